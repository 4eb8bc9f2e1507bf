"""Run folders for the tests of the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_folder import write_run

from preproj.report import write_report


@pytest.fixture
def build_run(tmp_path: Path) -> Callable[..., Path]:
    """Builds a run folder, changed as asked, and returns its path."""

    def build(name: str = "demo", **changes: Any) -> Path:
        return write_run(tmp_path / name, **changes)

    return build


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with its report, one cell missing; tests leave it as it is."""
    folder = write_run(tmp_path_factory.mktemp("runs") / "demo", missing=["lora-qkv"])
    write_report(folder)
    return folder
