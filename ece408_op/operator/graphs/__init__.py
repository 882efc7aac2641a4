"""Recognises, guards, compiles, fuses and binds the graphs that MXNet runs."""
