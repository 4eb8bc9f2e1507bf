"""Real data: tests marked `data` read the folder named by PREPROJ_DATA, and are deselected where it is not set."""

import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "PREPROJ_DATA" in os.environ:
        return
    without = [item for item in items if item.get_closest_marker("data")]
    if without:
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if not item.get_closest_marker("data")]


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real text and benchmarks."""
    return Path(os.environ["PREPROJ_DATA"])
