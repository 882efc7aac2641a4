"""Host machine: GPUs and their driver, cores, memory; and handling of Ctrl-C."""
