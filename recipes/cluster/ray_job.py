"""The cells of a recipe as tasks on a Ray cluster that runs already, in one run folder that every node sees.

    python ray_job.py recipe.yaml runs/mine

Ray runs as many at once as there are GPUs, or CPUs where there is none. Each task is the command that runs one cell, so
a task that Ray starts again goes on from the last checkpoint. At the end the report joins them.
"""

import re
import subprocess
import sys

import ray


def preproj(*arguments: str) -> list[str]:
    """Return the command line of preproj."""
    return [sys.executable, "-m", "preproj", *arguments]


@ray.remote
def run_cell(recipe: str, run: str, cell: str) -> int:
    """Run one cell and return its exit code."""
    return subprocess.run(preproj("probe", recipe, "--out", run, "--cell", cell), check=False).returncode


def main(recipe: str, run: str) -> int:
    """Run every cell of a recipe and return the number of those that did not end well."""
    ray.init(address="auto")
    gpus = 1 if ray.cluster_resources().get("GPU") else 0
    listed = subprocess.run(
        preproj("probe", recipe, "--out", run, "--dry-run"), check=True, stdout=subprocess.PIPE, text=True
    )
    cells = re.findall(r"^(\S+/seed\d+) ", listed.stdout, re.MULTILINE)
    task = run_cell.options(num_cpus=1, num_gpus=gpus, max_retries=3)
    codes = ray.get([task.remote(recipe, run, cell) for cell in cells])
    subprocess.run(preproj("report", run), check=True)
    return sum(code != 0 for code in codes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
