"""`python -m ece408_op` is the `ece408` command."""

from .cli import main

if __name__ == "__main__":
    main()
