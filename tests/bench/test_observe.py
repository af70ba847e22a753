"""The benchmark of watching asks real ranks, with the observer in one set of them and not in the other."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from small import small

from samestep import events
from samestep.bench import observe
from samestep.errors import RankFailure
from samestep.launch.functions.pool import RankPool
from samestep.launch.start.prefork_server import PreforkServer

TRAIN = observe.train


class ForkServer(PreforkServer):
    """Keeps exit codes: the threads of a set both ask for those of its ranks."""

    def __init__(self, variables):
        super().__init__(variables)
        self._codes, self._asking = {}, threading.Lock()

    def _look(self, pid, reap):
        with self._asking:
            code = self._codes[pid] if pid in self._codes else super()._look(pid, reap)
            if reap:
                self._codes[pid] = code
            return code


def small_train(path, device):
    """Trains a small network, and has all events written before each answer, not every half second."""
    answer = observe._answer

    def written(*args):
        for file in events._files:
            file._write()
        answer(*args)

    small(TRAIN, (path, device), _answer=written)


@pytest.fixture(scope="module", autouse=True)
def _forked_ranks():
    """Forks the ranks of both sets from one process, and gives them a small network."""
    server = ForkServer({"OMP_NUM_THREADS": "1"})
    assert server.why_unavailable() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observe, "RankPool", partial(RankPool, server=server))
        patch.setattr(observe, "train", small_train)
        yield
    server.close()


def test_both_sets_take_the_steps_and_only_one_writes_a_journal(tmp_path):
    ours, theirs, facts = observe.compare(observe.RECORDER, tmp_path, 1, 1, "cpu", 3)
    assert (len(ours), len(theirs)) == (1, 1)
    assert min(*ours, *theirs) > 0
    assert (facts["ranks"], facts["steps_per_block"]) == (1, observe.STEPS)
    assert facts["bytes_of_journal_a_step"] > 500  # digests of six gradients, and of six parameters twice
    assert {path.suffix for path in tmp_path.rglob("rank0.*")} == {".jsonl"}
    assert [path.name for path in tmp_path.glob("*.journals")] == ["seen.journals"]


def test_events_are_kept_in_one_set_of_the_two(tmp_path):
    ours, theirs, facts = observe.compare(observe.TIMELINE, tmp_path, 1, 1, "cpu", 3)
    assert (len(ours), len(theirs)) == (1, 1)
    assert facts["bytes_of_journal_a_step"] > 200
    assert [path.name for path in tmp_path.rglob("rank0.*")] == ["rank0.events.jsonl"]


def test_the_events_of_a_step_are_timed_with_what_writes_them(monkeypatch):
    monkeypatch.setattr(observe, "NOTED_STEPS", 30)
    comparison = observe._notes(repeats=2)
    assert min(comparison.ours) > 1e-6
    assert comparison.theirs == (observe.EVENTS_S,) * 2


def test_steps_that_keep_values_are_held_against_their_neighbours():
    seconds = [1.0] * 70
    for step in (4, 16, 64):
        seconds[step] = 3.0
    assert observe._more(seconds) == 2.0
    assert observe._more([1.0] * 3) == 0.0


def test_ranks_that_fail_are_an_error_and_no_endless_wait(tmp_path):
    with pytest.raises(RankFailure, match="No module named 'nowhere'|gave no answer|ended|failed"):
        observe.RankSet(tmp_path / "plain.socket", 1, "cpu", "nowhere:Watch")


def test_the_digest_is_timed_for_100_megabytes():
    comparison = observe._digests(repeats=2)
    assert len(comparison.ours) == 2
    assert comparison.theirs == (observe.DIGEST_S,) * 2
