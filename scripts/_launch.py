"""Launcher that runs a subcommand of `ece408` as a separate script."""

import sys


def launch(command):
    try:
        from ece408_op.__main__ import main
    except ImportError as error:
        if error.name is None or error.name.split(".")[0] != "ece408_op":
            raise
        sys.exit(
            f"{command}: ece408_op is not installed for {sys.executable}; "
            "run 'make run' and use .venv/bin/python, or 'pip install .'"
        )
    main([command, *sys.argv[1:]])
