"""Claims: which worker does what in a run folder that many share.

A claim is a file ``.claim-N`` in the folder of the work, made where there was none (``O_EXCL``): of several workers one
succeeds. Its holder rewrites it every few seconds. A worker that has itself seen it unchanged for a minute takes the
work over by making ``.claim-N+1``; so does one on the same machine, at once, that finds the holder's process gone.
Whoever finds a newer claim than its own stops and writes no more. This needs no locks of the file system and no clocks
that agree, only that a file is made once: local disks, NFS from version 3, Lustre, GPFS, BeeGFS and CephFS do.
"""

import json
import os
import platform
import subprocess
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from preproj.probe.errors import RecipeError

BEAT = 5.0
"""Seconds between two signs of life."""
SILENCE = 60.0
"""Seconds without one after which a holder counts as gone; more than NFS keeps what it has read."""
POLL = 1.0
"""Seconds between two looks of a worker that waits."""
VARIABLE = "PREPROJ_CLAIM"
"""Environment variable that names the claim which a child process works under."""

_BYTES = 512  # of a claim; it is rewritten in place, so that a reader always finds its token


class Claim:
    """Work held by this process. As a context it gives signs of life, and at its end others may take the work.

    Attributes:
        number: of the claim in its folder; the highest counts.
        left_by: the holder before, who was gone.
    """

    left_by: str | None = None

    def __init__(self, folder: Path, number: int, token: str):
        self.folder, self.number, self.token = folder, number, token
        self._path = _path(folder, number)
        self._worker = _identity(os.getpid())
        self._child: subprocess.Popen | None = None
        self._beats = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)

    @classmethod
    def take(cls, folder: Path, number: int) -> "Claim | None":
        """Claim a folder, or return None where another worker was faster.

        Raises:
            RecipeError: if the file system makes a file twice.
        """
        claim = cls(folder, number, uuid.uuid4().hex)
        try:
            _make(claim._path)
        except FileExistsError:
            return None
        try:
            _make(claim._path)
        except FileExistsError:
            claim._write()
            return claim
        claim._path.unlink()
        raise RecipeError(
            f"{folder} is on a file system that makes a file anew where there is one (no O_EXCL), so two workers could "
            "not part the work; choose another folder with --out."
        )

    @classmethod
    def of_parent(cls) -> "Claim | None":
        """Return the claim that the process which started this one holds for it."""
        if VARIABLE not in os.environ:
            return None
        folder, number, token = json.loads(os.environ[VARIABLE])
        return cls(Path(folder), number, token)

    def environment(self) -> dict[str, str]:
        """Return the variable that names this claim to a child process."""
        return {VARIABLE: json.dumps([str(self.folder), self.number, self.token])}

    def __enter__(self) -> "Claim":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()
        with suppress(OSError):  # the others wait until it is silent for long enough
            if not self.lost():
                self._write(free=True)

    def follow(self, child: subprocess.Popen) -> None:
        """Let the claim stand for a child process, and end that when the claim is lost."""
        self._child = child
        self._write()

    def lost(self) -> bool:
        """Whether another worker has taken the work over."""
        try:
            mine = self.token in self._path.read_text("ascii")
        except FileNotFoundError:
            return True
        return not mine or _path(self.folder, self.number + 1).exists()

    def check(self) -> None:
        """End this process if the claim is lost."""
        if self.lost():
            raise SystemExit("another worker has taken this over.")

    def remove(self) -> None:
        """Remove this claim and those before it: the work is done."""
        self._end.set()
        self._thread.join()
        for number in range(self.number + 1):
            _path(self.folder, number).unlink(missing_ok=True)

    def _live(self) -> None:
        while not self._end.wait(BEAT):
            try:
                if self.lost():
                    if self._child:
                        self._child.kill()
                    return
                self._write()
            except OSError:  # the file system may be back at the next beat; if not, another takes over
                continue

    def _write(self, free: bool = False) -> None:
        self._beats += 1
        holder = _identity(self._child.pid) if self._child and self._child.poll() is None else self._worker
        content = {"token": self.token, **holder, "free": free, "beats": self._beats}
        descriptor = os.open(self._path, os.O_WRONLY)
        try:
            os.write(descriptor, json.dumps(content).ljust(_BYTES).encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class Watch:
    """What a worker has seen of the claims of others, by its own clock."""

    def __init__(self) -> None:
        self._seen: dict[Path, _Seen] = {}

    def take(self, folder: Path) -> Claim | None:
        """Claim the work in a folder, if nobody holds it or its holder is gone."""
        folder.mkdir(parents=True, exist_ok=True)
        seen = self._look(folder)
        if seen is not None and seen.held:
            return None
        claim = Claim.take(folder, 0 if seen is None else seen.number + 1)
        if claim and seen and not seen.free:
            claim.left_by = seen.holder
        return claim

    def holder(self, folder: Path) -> str | None:
        """Name who holds the work in a folder, or None where nobody does or the holder is gone."""
        seen = self._look(folder)
        return seen.holder if seen is not None and seen.held else None

    def alive(self, folder: Path) -> bool:
        """Whether this worker has seen a sign of life of the holder."""
        seen = self._look(folder)
        return seen is not None and seen.alive

    def _look(self, folder: Path) -> "_Seen | None":
        number = max((int(path.name.rpartition("-")[2]) for path in folder.glob(".claim-*")), default=None)
        if number is None:
            self._seen.pop(folder, None)
            return None
        try:
            content = _path(folder, number).read_text("ascii")
        except FileNotFoundError:  # removed since
            return None
        known = self._seen.get(folder)
        if known is None or known.number != number:
            known = self._seen[folder] = _Seen(number, content)
        known.update(content)
        return known


class _Seen:
    """A claim as a worker has watched it."""

    def __init__(self, number: int, content: str):
        self.number, self.content = number, content
        self.silent, self.alive = 0.0, False
        self._last = time.monotonic()

    def update(self, content: str) -> None:
        now = time.monotonic()
        if content != self.content:
            self.content, self.silent, self.alive = content, 0.0, True
        else:
            # A pause of this worker, who saw nothing then, is no silence of the other.
            self.silent += min(now - self._last, 2 * BEAT)
        self._last = now

    @property
    def _fields(self) -> dict[str, Any]:
        try:
            return json.loads(self.content)
        except ValueError:  # just made
            return {}

    @property
    def free(self) -> bool:
        """Whether the holder gave it back."""
        return self._fields.get("free", False)

    @property
    def held(self) -> bool:
        """Whether somebody holds the claim, for all that this worker knows."""
        fields = self._fields
        gone = fields.get("machine") is not None and fields["machine"] == _machine() and not _runs(fields)
        return not (self.free or gone or self.silent >= SILENCE)

    @property
    def holder(self) -> str:
        fields = self._fields
        return f"process {fields['process']} on {fields['host']}" if fields else "another worker"


def _path(folder: Path, number: int) -> Path:
    return folder / f".claim-{number}"


def _make(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


def _identity(process: int) -> dict[str, Any]:
    return {"host": platform.node(), "machine": _machine(), "process": process, "started": _started(process)}


def _runs(fields: dict[str, Any]) -> bool:
    """Whether the process of a claim of this machine runs, and is not another that got its number."""
    return fields["started"] is not None and _started(fields["process"]) == fields["started"]


def _machine() -> str | None:
    """Return what tells the processes this one can see from all others; None where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        # A container has processes of its own, and those of other users may be hidden.
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return None


def _started(process: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None where it has ended."""
    try:
        # Its name, in parentheses, may hold anything.
        fields = Path(f"/proc/{process}/stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
