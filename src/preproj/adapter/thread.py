"""A value of each thread: a model may run in several threads at once."""

import threading
from typing import Any

import torch

_TRACED = 0  # the key in code that torch.compile made, which cannot ask for its thread


class PerThread:
    """Holds what one thread has put in; another thread, a copy and a pickle find nothing.

    Code that ``torch.compile`` made keeps values of one call only, so they need no thread. Where it makes a part of the
    model alone, the other part takes them over: eager code looks for what compiled code left, and compiled code breaks
    its graph to look for what eager code left.
    """

    def __init__(self) -> None:
        self._values: dict[int, Any] = {}

    def get(self) -> Any:
        """Return this thread's value, or None."""
        if torch.compiler.is_compiling() and (not self._values or _TRACED in self._values):
            return self._values.get(_TRACED)
        return self._get()

    def set(self, value: Any) -> None:
        """Keep a value for this thread; None removes it."""
        if torch.compiler.is_compiling() and (not self._values or _TRACED in self._values):
            if value is None:
                self._values.pop(_TRACED, None)
            else:
                self._values[_TRACED] = value
        else:
            self._set(value)

    @torch.compiler.disable
    def _get(self) -> Any:
        return self._values.get(threading.get_ident(), self._values.get(_TRACED))

    @torch.compiler.disable
    def _set(self, value: Any) -> None:
        self._values.pop(_TRACED, None)
        if value is None:
            self._values.pop(threading.get_ident(), None)
        else:
            self._values[threading.get_ident()] = value

    def __deepcopy__(self, memo: dict) -> "PerThread":
        """Return one without values."""
        return PerThread()

    def __reduce__(self) -> tuple:
        """Pickle as one without values."""
        return PerThread, ()
