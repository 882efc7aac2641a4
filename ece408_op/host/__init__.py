"""What this machine has: GPUs and their driver, cores, memory; and Ctrl-C during long work."""
