"""PEFT's own generic tests pass with our method."""

import subprocess

import host_tests
import pytest
from suites import PAGE, SUITES, run


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("suite", SUITES)
def test_peft_s_own_tests_pass_and_the_page_says_so(suite):
    outcome = run(suite)
    assert outcome.failed == (), outcome.said
    assert outcome.row(suite) in PAGE.read_text("utf-8").splitlines()


def test_a_distribution_that_cannot_be_fetched_is_named_and_leaves_nothing(tmp_path, monkeypatch):
    def no_network(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found")

    monkeypatch.setenv("PREPROJ_CACHE", str(tmp_path))
    monkeypatch.setattr(host_tests.subprocess, "run", no_network)
    with pytest.raises(RuntimeError, match=r"pip could not fetch the source distribution of peft [\s\S]*No matching"):
        host_tests.host_tests()
    assert list(tmp_path.iterdir()) == []
