"""The processes that a worker starts: how it starts them, and what they have in common."""

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from preproj.probe import distributed
from preproj.probe.base import Base
from preproj.probe.claims import Claim
from preproj.probe.files import guard_writes


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


@contextmanager
def start_process(folder: Path) -> Iterator[None]:
    """Tie this process to the worker that started it, and to its claim: without it no more is written in ``folder``."""
    _exit_with_parent()
    transformers_logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    claim = Claim.of_parent()
    if claim is None:
        yield
        return
    claim.check()
    with guard_writes(claim.check):
        yield


def _exit_with_parent() -> None:
    """End this process when the worker is gone: its end of our standard input is closed then, even by kill -9."""

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def run_module(
    module: str,
    arguments: list[str],
    log: Path,
    base: Base,
    claim: Claim,
    on_progress: Callable[[int], Any] = lambda _: None,
) -> int:
    """Run a part of the work in its own process, so that its peak memory is its own.

    Args:
        module: what ``python -m`` runs.
        arguments: of its command line.
        log: file for its messages.
        base: the model; one in a folder needs no network.
        claim: that the work is done under.
        on_progress: called with the work done so far.

    Returns:
        The exit code.
    """
    environment = {**distributed.alone(os.environ), "TOKENIZERS_PARALLELISM": "false", **claim.environment()}
    # One device a cell: with more, the Trainer would split the batch over them.
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if base.path is not None:
        environment["HF_HUB_OFFLINE"] = "1"
    with log.open("a", encoding="utf-8") as file:
        child = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            env=environment,
        )
        try:
            claim.follow(child)
            assert child.stdout is not None
            for line in child.stdout:
                if line.strip().isdigit():
                    on_progress(int(line))
            return child.wait()
        finally:
            child.kill()
            child.wait()


def last_line(log: Path) -> str:
    """Return the last message of a log, which is no line of a warning's source or of a progress bar."""
    lines = re.split(r"[\r\n]+", log.read_text("utf-8"))
    return next((line for line in reversed(lines) if re.match(r"\S", line) and "%|" not in line), "no message")
