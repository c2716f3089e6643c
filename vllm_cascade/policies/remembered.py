# SPDX-License-Identifier: Apache-2.0
"""A bounded LRU cache of schedules: clients choose how many there are.

With ``keep_prompt`` each length of a short prompt has its own, and some have a million rows.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import RLock
from typing import Generic, Protocol, TypeVar

MAX_SCHEDULES = 512
"""Most schedules that are remembered."""
MAX_ROWS = 1 << 21
"""Most rows of all of them; the latest one alone may have more."""


class HasRows(Protocol):
    """Something with a table.

    Attributes:
        num_rows: rows and rules of the table, which its memory grows with.
    """

    num_rows: int


Made = TypeVar("Made", bound=HasRows)


class Remembered(Generic[Made]):
    """An LRU cache, bounded by entries and by table rows."""

    def __init__(self) -> None:
        self._found: OrderedDict[Hashable, Made] = OrderedDict()  # least recently used first
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """The entry of a key, made if it is missing."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
                return self._found[key]
            own = self._found[key] = make()
            while len(self) > 1 and (len(self) > MAX_SCHEDULES or self._num_rows() > MAX_ROWS):
                self._found.popitem(last=False)
            return own

    def _num_rows(self) -> int:
        """Rows of all that is remembered; what has several keys counts once."""
        return sum(own.num_rows for own in set(self._found.values()))

    def clear(self) -> None:
        with self._lock:
            self._found.clear()
