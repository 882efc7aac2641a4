"""A fake clock."""

import functools
import threading
from collections import defaultdict


class Clock:
    """Seconds pass only in `spending`, separately for each thread. The thread that made it waits
    for all others before it reads the time."""

    def __init__(self):
        self._now, self._spent = 0, defaultdict(int)
        self._waits = threading.get_ident()

    def __call__(self):
        thread = threading.get_ident()
        if thread == self._waits:
            self._now += max(self._spent.values(), default=0)
            self._spent.clear()
        return self._now + self._spent[thread]

    def spending(self, seconds):
        """Return a function that takes this many seconds."""
        return functools.partial(self._spend, seconds)

    def _spend(self, seconds):
        self._spent[threading.get_ident()] += seconds
