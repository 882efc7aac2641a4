"""Server end of `process`; uses only the standard library, so that any Python can run it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any


def serve(versions: dict[str, Any], answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Write the versions, then answer each line of stdin with a line of stdout until stdin ends."""
    print(json.dumps(versions), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
