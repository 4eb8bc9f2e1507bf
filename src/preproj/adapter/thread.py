"""A value of each thread: a model may run in several threads at once."""

import threading
from typing import Any

import torch


class PerThread:
    """Holds what one thread has put in; another thread, a copy and a pickle find nothing."""

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}

    def get(self) -> Any:
        """Return this thread's value, or None."""
        return self._values.get(_thread())

    def set(self, value: Any) -> None:
        """Keep a value for this thread; None removes it."""
        if value is None:
            self._values.pop(_thread(), None)
        else:
            self._values[_thread()] = value

    def __deepcopy__(self, memo: dict) -> "PerThread":
        """Return one without values."""
        return PerThread()

    def __reduce__(self) -> tuple:
        """Pickle as one without values."""
        return PerThread, ()


def _thread() -> int:
    # What torch.compile traces holds values of one call only, so they need no thread.
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
