"""What a result depends on besides the recipe: versions and hardware."""

import datetime
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

PACKAGES = ("preproj", "torch", "transformers", "peft", "accelerate", "datasets", "tokenizers", "numpy", "scipy")


def describe_environment() -> dict[str, Any]:
    """Return what this process runs with (docs/run-folder.md, environment.json)."""
    cuda = torch.cuda.is_available()
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "packages": {"python": platform.python_version(), **{name: metadata.version(name) for name in PACKAGES}},
        "git_commit": _git_commit(),
        "hardware": {
            "device": "cuda" if cuda else "cpu",
            "device_name": torch.cuda.get_device_name() if cuda else _cpu_name(),
            "cpu": _cpu_name(),
            "cores": psutil.cpu_count(logical=True),
            "memory_bytes": psutil.virtual_memory().total,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "threads": torch.get_num_threads(),
    }


def peak_memory_bytes() -> int:
    """Return this process's peak memory: allocated on CUDA, else resident."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # VmHWM is this process's own; ru_maxrss takes over the parent's across exec
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    import resource  # not on Windows

    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _git_commit() -> str | None:
    """Return the commit of the checkout this package runs from, or None when it runs from an installation."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if git("ls-files", Path(__file__).name) == "":
            return None
        return git("rev-parse", "HEAD") + ("-dirty" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
