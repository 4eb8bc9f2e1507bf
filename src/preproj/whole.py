"""Files that are whole or not there: written under another name, and renamed when they are on the disk."""

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_file(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Give a name to write a file under; it takes ``path`` at the end, and leaves nothing where that is not reached.

    Args:
        path: of the file.
        check: called at the last moment; the file is not written where it raises.

    Raises:
        OSError: if the disk is full or the folder read-only; what was at ``path`` stays as it was.
    """
    # Processes of two machines may have the same number.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield temporary
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        check()
        temporary.replace(path)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
    finally:
        with suppress(OSError):  # on a read-only file system not even this
            temporary.unlink()
