"""The examples for clusters: a Slurm array and a Ray job."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from preproj.probe.files import read_json

EXAMPLES = Path(__file__).parent.parent.parent / "recipes/cluster"


def test_the_slurm_script_runs_the_cell_of_its_task(recipe, write_recipe, tmp_path):
    script, calls = EXAMPLES / "slurm-array.sh", tmp_path / "calls"
    subprocess.run(["bash", "-n", str(script)], check=True)
    # In place of the command, one that prints what --dry-run prints (tests/probe/test_workers.py) and keeps its calls.
    (tmp_path / "preproj").write_text(
        f'#!/bin/bash\necho "$@" >>{calls}\n'
        'case "$*" in *--dry-run) printf "part trained\\npre/trial0 1\\nnone/seed0 0\\npre+skip/seed3 1\\n\\nx\\n"\n'
        "esac\n"
    )
    (tmp_path / "preproj").chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    for task, cell in (("0", "none/seed0"), ("1", "pre+skip/seed3")):
        environment = {**os.environ, "PATH": path, "SLURM_ARRAY_TASK_ID": task}
        subprocess.run(["bash", str(script), "my recipe.yaml", "runs/mine"], check=True, env=environment)
        assert calls.read_text().splitlines()[-2:] == [
            "probe my recipe.yaml --out runs/mine --dry-run",
            f"probe my recipe.yaml --out runs/mine --cell {cell}",
        ]
    # A task beyond the last cell, and a recipe that is refused, fail.
    environment = {**os.environ, "PATH": path, "SLURM_ARRAY_TASK_ID": "2"}
    assert subprocess.run(["bash", str(script), "r", "o"], check=False, env=environment, capture_output=True).returncode
    (tmp_path / "preproj").write_text("#!/bin/bash\nexit 2\n")
    assert subprocess.run(["bash", str(script), "r", "o"], check=False, env=environment).returncode == 2


@pytest.mark.slow
def test_the_slurm_array_and_the_ray_job_make_the_same_run(recipe, write_recipe, tmp_path, monkeypatch):
    recipe |= {"methods": ["none", "skip"], "seeds": [0, 1]}
    path = write_recipe(recipe)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    array, job = tmp_path / "array", tmp_path / "job"
    for task in range(3):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", str(task))
        subprocess.run(["bash", str(EXAMPLES / "slurm-array.sh"), str(path), str(array)], check=True)
    assert (array / "report.html").exists()  # of the last one
    port = "6399"
    cluster = subprocess.Popen(
        [*("ray", "start", "--head", "--block", "--port", port, "--num-cpus", "2", "--include-dashboard", "false")],
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert cluster.stdout is not None
        next(line for line in cluster.stdout if "--address=" in line or "Ray runtime started" in line)
        done = subprocess.run(
            [sys.executable, str(EXAMPLES / "ray_job.py"), str(path), str(job)],
            check=False,
            env={**os.environ, "RAY_ADDRESS": f"127.0.0.1:{port}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    finally:
        os.killpg(cluster.pid, signal.SIGTERM)
        cluster.wait(60)
    ours, theirs = (
        [(row["method"], row["seed"], row["scores"]) for row in read_json(run / "summary.json")["rows"]]
        for run in (array, job)
    )
    assert ours == theirs
    assert re.search(r"Report: .*report\.html", done.stdout)
