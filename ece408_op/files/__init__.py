"""Files: atomic writes, cache with checksums, installed resources, JSON and Markdown."""
