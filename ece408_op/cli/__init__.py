"""The `ece408` command: `main`, and a module for each command."""
