"""Policies in memory: found by digest while their process lives, the last two of a process, gone with the process."""

import shutil
import subprocess
import sys

import pytest

from infra import handover


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(handover, "MEMORY", tmp_path)
    return tmp_path


def hand_over(digest: str) -> None:
    folder = handover.place(1)
    assert folder is not None and not any(folder.iterdir())
    (folder / "weights").write_text(digest)
    handover.offer(folder, digest)


def test_the_one_offered_last_is_found_and_the_one_before_it(memory):
    """An engine that refuses `cc` goes back to `bb`."""
    for digest in ("aa", "bb", "cc"):
        hand_over(digest)
    assert handover.offered("aa") is None
    for digest in ("bb", "cc"):
        found = handover.offered(digest)
        assert found is not None and (found / "weights").read_text() == digest


def test_the_same_policy_is_offered_again_and_what_was_given_up_goes(memory):
    hand_over("aa")
    given_up = handover.place(1)
    hand_over("bb")
    hand_over("bb")
    assert given_up is not None and not given_up.exists()
    assert handover.offered("aa") and handover.offered("bb")


def test_what_is_not_finished_is_not_offered(memory):
    handover.place(1)
    assert handover.offered("new") is None


def test_what_a_dead_process_left_goes_and_what_a_living_one_offers_stays(memory):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    hand_over("aa")
    (handover.root() / f"{gone.pid}-bb").mkdir()
    (handover.root() / "1-cc").mkdir()  # process 1 lives
    handover.sweep()
    assert [handover.offered(name) is not None for name in ("aa", "bb", "cc")] == [True, False, True]


def test_without_such_a_place_engines_read_the_store(memory, monkeypatch, caplog):
    monkeypatch.setattr(handover, "MEMORY", memory / "missing")
    assert handover.place(1) is None
    assert "engines read the store" in caplog.text


def test_a_place_that_is_too_small_is_told_and_not_used(memory, caplog):
    """As the 64 MB that a container gets."""
    free = shutil.disk_usage(memory).free
    assert handover.place(free + 10**9) is None
    assert "no policy can be handed over in memory" in caplog.text and "make it larger" in caplog.text
    assert list(handover.root().iterdir()) == []
