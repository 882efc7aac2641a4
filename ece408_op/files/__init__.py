"""Files: written whole, kept in the cache with a checksum, or installed; Markdown tables."""
