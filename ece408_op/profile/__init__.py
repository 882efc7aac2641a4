"""What a program did and how long each part took: recorded, summed up in nvprof's columns, kept."""
