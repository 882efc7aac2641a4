"""Recognition, guarding, compilation, partition and binding of the graphs that MXNet runs."""
