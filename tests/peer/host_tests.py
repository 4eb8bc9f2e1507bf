"""PEFT's own tests, of the version that is installed: its source distribution has them, its wheel does not."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import platformdirs

PACKAGE = "peft_tests"  # what the folder `tests` of the distribution is called here, so that it clashes with nothing


def host_tests() -> Path:
    """Returns the folder that holds PEFT's tests as the package ``peft_tests``; pip fetches it once for each version.

    Raises:
        RuntimeError: where pip cannot fetch the source distribution, or it has no tests.
    """
    version = importlib.metadata.version("peft")
    cache = Path(os.environ.get("PREPROJ_CACHE") or platformdirs.user_cache_dir("preproj"))
    folder = cache / f"peft-{version}-tests"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as work:
            tests = _fetch(version, Path(work)) / "tests"
            if not tests.is_dir():
                raise RuntimeError(f"the source distribution of peft {version} has no folder `tests`.")
            (tests / "__init__.py").touch()
            whole = Path(work) / "whole"
            whole.mkdir()
            tests.rename(whole / PACKAGE)
            try:
                whole.rename(folder)
            except OSError:  # another process was faster
                if not folder.is_dir():
                    raise
    return folder


def _fetch(version: str, work: Path) -> Path:
    """Downloads and unpacks the source distribution."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "peft", f"peft=={version}"]
    done = subprocess.run([*command, "--dest", work], capture_output=True, text=True, check=False)
    archives = list(work.glob("peft-*.tar.gz"))
    if done.returncode or not archives:
        raise RuntimeError(
            f"pip could not fetch the source distribution of peft {version}, which PEFT's own tests come from; they "
            f"need a package index, once. `{' '.join(command)}` said:\n{done.stdout[-1000:]}{done.stderr[-1000:]}"
        )
    shutil.unpack_archive(archives[0], work, filter="data")
    return work / f"peft-{version}"
