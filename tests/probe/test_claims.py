"""Claims on work in a shared folder: one holder at a time, whatever dies, stops or pauses."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from preproj.probe import claims
from preproj.probe.claims import Claim, Watch
from preproj.probe.errors import RecipeError


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A holder counts as gone after half a second."""
    monkeypatch.setattr(claims, "BEAT", 0.1)
    monkeypatch.setattr(claims, "SILENCE", 0.5)


@pytest.fixture
def elsewhere(monkeypatch):
    """Nothing tells that two workers are on one machine."""
    monkeypatch.setattr(claims, "_machine", lambda: None)


def wait_to_take(watch: Watch, folder, seconds: float = 20) -> Claim:
    end = time.monotonic() + seconds
    while not (claim := watch.take(folder)):
        assert time.monotonic() < end, "the claim was never to be had"
        time.sleep(0.05)
    return claim


def test_what_one_holds_no_other_gets_until_it_is_given_back(tmp_path, elsewhere):
    with Watch().take(tmp_path) as claim:
        other = Watch()
        end = time.monotonic() + 2 * claims.SILENCE  # it gives signs of life
        while time.monotonic() < end:
            assert other.take(tmp_path) is None
            time.sleep(0.05)
        assert other.holder(tmp_path) == f"process {os.getpid()} on {os.uname().nodename}"
        assert other.alive(tmp_path)
    taken = other.take(tmp_path)
    assert (taken.number, taken.left_by) == (claim.number + 1, None)
    assert claim.lost()
    assert not taken.lost()


def test_of_many_that_take_at_once_one_gets_it(tmp_path, elsewhere):
    for left in (None, "free", "silent"):
        folder = tmp_path / str(left)
        watches = [Watch() for _ in range(16)]
        if left == "free":
            with Watch().take(folder):
                pass
        elif left == "silent":
            assert Watch().take(folder)
            end = time.monotonic() + 20
            while any(watch.holder(folder) for watch in watches):
                assert time.monotonic() < end
                time.sleep(0.05)
        start, taken = threading.Barrier(16), []

        def take(watch, folder=folder, start=start, taken=taken):
            start.wait()
            taken.append(watch.take(folder))

        threads = [threading.Thread(target=take, args=(watch,)) for watch in watches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 16
        assert sum(claim is not None for claim in taken) == 1, left


def test_a_holder_that_was_silent_finds_that_it_has_lost_and_its_child_is_ended(tmp_path, elsewhere):
    claim = Watch().take(tmp_path)  # no signs of life yet
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        claim.follow(child)
        assert not claim.lost()
        taken = wait_to_take(Watch(), tmp_path)
        assert taken.left_by == f"process {child.pid} on {os.uname().nodename}"
        assert claim.lost()
        with claim:  # it wakes
            assert child.wait(20) == -9
    assert not taken.lost()
    with pytest.raises(SystemExit, match=r"another worker has taken this over"):
        claim.check()


def test_a_claim_that_was_removed_is_lost_even_if_another_has_its_number(tmp_path):
    stopped = Watch().take(tmp_path)
    finished = Claim.take(tmp_path, 1)
    with finished:
        finished.remove()  # the work is done
    assert list(tmp_path.iterdir()) == []
    assert stopped.lost()
    late = Watch().take(tmp_path)
    assert late.number == stopped.number
    assert stopped.lost()
    assert not late.lost()


def test_a_holder_whose_process_has_ended_on_this_machine_is_gone_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "SILENCE", 1e9)
    claim = Watch().take(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        claim.follow(child)
        assert Watch().take(tmp_path) is None
        child.kill()
    content = (tmp_path / ".claim-0").read_text()
    # The same number of a process on another machine, or of one that got the number since, says nothing of the holder.
    for change, held in (({"machine": "another"}, True), ({"machine": None}, True), ({}, False)):
        (tmp_path / ".claim-0").write_text(json.dumps(json.loads(content) | change))
        assert (Watch().holder(tmp_path) is not None) is held, change
    mine = json.loads(content) | {"process": os.getpid()}
    (tmp_path / ".claim-0").write_text(json.dumps(mine))
    assert Watch().take(tmp_path).left_by == f"process {os.getpid()} on {os.uname().nodename}"


def test_a_claim_that_was_made_and_never_written_is_taken_over(tmp_path, elsewhere):
    (tmp_path / ".claim-0").touch()
    watch = Watch()
    assert watch.take(tmp_path) is None
    assert watch.holder(tmp_path) == "another worker"
    assert wait_to_take(watch, tmp_path).number == 1


def test_a_pause_of_the_watcher_is_no_silence_of_the_holder(tmp_path, elsewhere, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    assert Watch().take(tmp_path)
    watch = Watch()
    assert watch.take(tmp_path) is None
    now[0] += 1000  # a laptop asleep, or a file system that hung for both
    assert watch.take(tmp_path) is None
    looks = 0
    while not watch.take(tmp_path):
        now[0] += 0.1
        looks += 1
    assert looks in (3, 4)  # of 0.1 seconds each, after one that counted 0.2: half a second in all


def test_a_file_system_without_exclusive_creation_is_refused_and_nothing_stays(tmp_path, monkeypatch):
    make = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *mode: make(path, flags & ~os.O_EXCL, *mode))
    with pytest.raises(RecipeError) as refused:
        Watch().take(tmp_path)
    assert str(refused.value) == (
        f"{tmp_path} is on a file system that makes a file anew where there is one (no O_EXCL), so two workers could "
        "not part the work; choose another folder with --out."
    )
    assert list(tmp_path.iterdir()) == []
