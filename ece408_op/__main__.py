"""`python -m ece408_op` is the `ece408` command."""

from .cli.main import main

if __name__ == "__main__":
    main()
