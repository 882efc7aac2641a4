"""Arrays on the host: the batch goes to the GPU and back in chunks."""
