"""Runs PEFT's generic test suites with our method, each in a process of its own, and writes what came out.

``python tests/peer/suites.py`` writes ``docs/peer-tests.md``.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from host_tests import PACKAGE, host_tests
from peer_plugin import OTHER_METHOD, PATCHES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/peer-tests.md"
SUITES = {
    "decoder": "test_decoder_models.py",
    "encoder-decoder": "test_encoder_decoder_models.py",
    "feature extraction": "test_feature_extraction_models.py",
    "sequence classification": "test_seq_classifier.py",
    "custom models": "test_custom_models.py",
}
OURS = [str(ROOT / folder) for folder in ("tests/peer", "tests/adapter", "src")]


@dataclass(frozen=True)
class Outcome:
    """What came out of a suite: how many tests passed, which failed, which were skipped and why, and pytest's words."""

    passed: int
    failed: tuple[str, ...]
    skipped: tuple[tuple[str, str], ...]  # reason, and name without parameters
    said: str

    def row(self, suite: str) -> str:
        """The suite's row in the page."""
        others = sum(reason == OTHER_METHOD for reason, _ in self.skipped)
        return f"| {suite} | {self.passed} | {len(self.failed)} | {len(self.skipped) - others} | {others} |"


def run(suite: str) -> Outcome:
    """Runs one suite of :data:`SUITES` in a fresh process.

    Raises:
        RuntimeError: where the host's tests cannot be fetched or pytest does not come to an end.
    """
    tests = host_tests()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "pytest", tests / PACKAGE / SUITES[suite], "-p", "peer_plugin", "-q"),
            *("-c", os.devnull, "--rootdir", tests, "-p", "no:cacheprovider", "--tb=short", "--junit-xml=outcome.xml"),
        ]
        paths = [*OURS, os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        report = Path(folder, "outcome.xml")
        if done.returncode > 1 or not report.is_file():
            raise RuntimeError(f"PEFT's {suite} tests did not run:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        cases = ElementTree.parse(report).findall(".//testcase")
    failed = tuple(case.get("name", "") for case in cases if {"failure", "error"} & {part.tag for part in case})
    skipped = tuple(
        (re.sub(r"<class '.*\.(\w+)'>", r"\1", skip.get("message", "")), case.get("name", "").partition("[")[0])
        for case in cases
        for skip in case.findall("skipped")
    )
    return Outcome(len(cases) - len(failed) - len(skipped), failed, skipped, done.stdout)


def page(outcomes: dict[str, Outcome]) -> str:
    """The Markdown of docs/peer-tests.md."""
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in ("peft", "transformers", "torch"))
    skips = [skip for outcome in outcomes.values() for skip in outcome.skipped if skip[0] != OTHER_METHOD]
    reasons = Counter(reason for reason, _ in skips).most_common()
    return "\n".join(
        [
            "# PEFT's own generic tests, with `PreProjConfig`",
            "",
            f"Written by `python tests/peer/suites.py` with {versions}; the slow test",
            "`tests/peer/test_peer.py` holds it to the code. The tests are those of PEFT's source distribution, which",
            "pip fetches. They run on tiny random models of the classes that they ask the Hub for; those for custom",
            "models, on small ones with attention in plain torch (`tests/peer/attention_models.py`).",
            "",
            "| suite | passed | failed | skipped | about other methods |",
            "|---|---:|---:|---:|---:|",
            *(outcome.row(suite) for suite, outcome in outcomes.items()),
            "",
            "## Skipped, and why",
            "",
            "| tests | reason | which |",
            "|---:|---|---|",
            *(
                f"| {count} | {why} | {', '.join(sorted({f'`{n}`' for r, n in skips if r == why}))} |"
                for why, count in reasons
            ),
            "",
            "## Changed in the host's tests",
            "",
            "All in `tests/peer/peer_plugin.py`; assertions and tolerances are the host's.",
            "",
            *(f"- {' '.join((patch.__doc__ or '').split())}" for patch in PATCHES),
            "",
        ]
    )


if __name__ == "__main__":
    found = {}
    for name in SUITES:
        found[name] = run(name)
        print(found[name].row(name), *found[name].failed, sep="\n", flush=True)
    PAGE.write_text(page(found), "utf-8")
