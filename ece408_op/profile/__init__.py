"""Records what a program did and how long each part took, and sums it up in nvprof's columns."""
