"""What every process that the runner starts has in common: it shows its progress, and it ends with the runner."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from transformers.utils import logging as transformers_logging


class Progress:
    """Shows the work done so far, in tokens of one forward pass; a process of the runner's prints it."""

    def __init__(self, show: Callable[[int], None] = lambda done: print(done, flush=True)):
        self.show = show
        self.done = 0

    def set(self, done: int) -> None:
        """Say how much is done."""
        self.done = done
        self.show(done)

    def add(self, done: int) -> None:
        """Say how much more is done."""
        self.set(self.done + done)


def start_process(folder: Path) -> FileLock:
    """Tie this process to the runner and return the lock of the folder it works in.

    An orphan of a killed runner may need a moment to end, so the lock waits for a minute.
    """
    _exit_with_parent()
    transformers_logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    return FileLock(folder / ".lock", timeout=60)


def _exit_with_parent() -> None:
    """End this process when the runner is gone: its end of our standard input is closed then, even by kill -9."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
