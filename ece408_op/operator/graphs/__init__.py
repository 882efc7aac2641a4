"""Recognition, guarding, compilation, fusion and binding of the graphs that MXNet runs."""
