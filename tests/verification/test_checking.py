"""`samestep run --check`: what follows from the ranks' letters, that they wait for nobody, and a few real scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from lazily import Lazily
from torch.distributed import HashStore

from samestep.verification.checking import seen
from samestep.verification.checking.judge import PATIENCE, Judge
from samestep.verification.checking.letters import EVERY, Detail, Farewell, Letter, Pass, read_letter, written
from samestep.verification.checking.post import KEPT, Post

ZOO = Path(__file__).parents[2] / "zoo"


def told(step: int, values: str = "a", gradients: str = "g", **more: object) -> tuple[Letter, Detail]:
    """One rank's letter; `values` and `gradients` have a character for each tensor."""
    names = [f"{i}.weight" for i in range(len(values))]
    calls = more.pop("last", [])
    letter = Letter(
        optimizer=0, step=step, steps=[step], rates=[0.1], calls=[len(calls), hash(str(calls))], layout="whole"
    )
    letter = replace(letter, parameters=values, gradients=gradients, is_dealt=True)
    order = more.get("order", [])
    detail = Detail(
        parameters=dict(zip(names, values, strict=True)),
        gradients=dict(zip(names, gradients, strict=False)),
        names=list(order[0]) if order else [],
        calls=calls,
    )
    return replace(letter, **more), detail


def judged(judge: Judge, *ranks: tuple[Letter, Detail]) -> list[str]:
    return [f"{one.code} {one.rank}" for one in judge.letters([letter for letter, _ in ranks], lambda i: ranks[i][1])]


def call(index: int, name: str, where: str) -> dict[str, object]:
    same = {"kind": "collective", "shapes": [], "dtypes": [""], "root": None, "reduce": None, "group": "all"}
    return same | {"index": index, "op": name, "where": where, "window": index, "between_two": False}


def test_ranks_that_agree_are_not_mentioned() -> None:
    judge = Judge(2)
    assert [judged(judge, told(step), told(step)) for step in (0, 16, 32)] == [[], [], []]
    ends = [Farewell(well=True, steps=[40], where="", probes={})] * 2
    assert judge.farewells(ends) == []


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (told(16, rates=[0.2]), "learning-rate-differs 1"),
        (told(16, schedules=1), "steps-differ 1"),
        (told(16, scaler=[17, 1, 32768.0]), "steps-differ 1"),
        (told(16, steps=[14]), "steps-differ 1"),
        (told(16, order=["ba", "ab"]), "parameter-order-differs 1"),
        (told(16, last=[call(0, "broadcast", "a.py:1"), call(1, "barrier", "a.py:3")]), "collective-mismatch 1"),
        (told(16, last=[call(0, "barrier", "a.py:2"), call(1, "barrier", "a.py:1")]), "collective-order 1"),
        (told(16, last=[call(0, "barrier", "a.py:1")]), "collective-order 1"),
        (told(16, "b"), "initial-state-differs 1"),
    ],
)
def test_each_kind_is_found_in_one_letter_and_told_once(other: tuple[Letter, Detail], code: str) -> None:
    judge = Judge(2)
    last = [call(0, "barrier", "a.py:1"), call(1, "barrier", "a.py:2")] if other[0].calls[0] else []
    first = told(
        16, scaler=[16, 0, 65536.0] if other[0].scaler else [], order=["ab", "ab"] if other[0].order else [], last=last
    )
    assert judged(judge, first, other) == [code]
    assert judged(judge, first, other) == []


def test_parameters_that_part_are_told_at_once_if_their_gradients_agree() -> None:
    judge = Judge(3)
    assert judged(judge, *[told(0, "ab", "gg")] * 3) == []
    assert judged(judge, told(16, "ab", "hh"), told(16, "ab", "hh"), told(16, "ac", "hh")) == ["parameters-diverged 2"]


def test_torn_gradients_are_told_at_the_next_letter_where_a_wrapper_should_have_averaged_them() -> None:
    judge = Judge(2)
    wrapped = {"is_wrapped": True, "is_together": True}
    assert judged(judge, told(0, "a", "g", **wrapped), told(0, "a", "h", **wrapped)) == []
    assert judged(judge, told(16, "b", "g", **wrapped), told(16, "c", "h", **wrapped)) == [
        "gradients-not-synchronised 1"
    ]


def local(judge: Judge, steps: range, probes: list[list[str]], **more: object) -> list[str]:
    """Steps with gradients of each rank's own, whose parameters differ from the second letter on."""
    found = []
    for step in steps:
        ranks = [
            told(step, "a" if step == 0 else name, name, probes=ours, **more)
            for name, ours in zip("bc", probes, strict=True)
        ]
        found += judged(judge, *ranks)
    return found


def test_local_steps_whose_parameters_are_averaged_later_are_meant() -> None:
    judge = Judge(2)
    assert local(judge, range(0, 64, EVERY), [["p"], ["q"]], is_wrapped=True) == []
    assert (
        local(judge, range(64, 80, EVERY), [["p", "r", "s"], ["q", "r", "t"]], is_wrapped=True) == []
    )  # agreed in between
    assert local(judge, range(80, 4 * PATIENCE, EVERY), [["p"], ["q"]], is_wrapped=True) == []


def test_local_steps_that_nobody_averages_are_told_when_patience_ends() -> None:
    assert local(Judge(2), range(0, PATIENCE, EVERY), [["p"], ["q"]], is_wrapped=True) == []
    found = local(Judge(2), range(0, PATIENCE + EVERY, EVERY), [["p"], ["q"]], is_wrapped=True)
    assert found == ["gradients-not-synchronised 1"]


@pytest.mark.parametrize(("probes", "codes"), [("pq", ["gradients-not-synchronised"]), ("pp", [])])
def test_or_at_the_end_unless_they_are_averaged_there(probes: str, codes: list[str]) -> None:
    judge = Judge(2)
    local(judge, range(0, 64, EVERY), [["p"], ["q"]], is_wrapped=True)
    ends = [Farewell(well=True, steps=[60], where="", probes={"0": probe}) for probe in probes]
    assert [one.code for one in judge.farewells(ends)] == codes


def test_models_that_are_not_meant_to_be_one_are_not_compared() -> None:
    assert local(Judge(2), range(0, 4 * PATIENCE, EVERY), [["p"], ["q"]]) == []  # by hand, no gradient ever agreed
    judge = Judge(2)
    assert judged(judge, told(0, "a", "g"), told(0, "b", "h")) == []  # stages of a pipeline
    assert judged(judge, told(0, "a", names="x"), told(0, "b", names="y")) == []
    assert judged(judge, told(0, "a", is_foreign=True), told(0, "b", is_foreign=True)) == []
    assert judged(judge, told(0, "a", layout="rows 0 to 2"), told(0, "b", layout="rows 2 to 4")) == []  # fully_shard


def test_ranks_that_end_after_different_numbers_of_steps_are_told() -> None:
    ends = [Farewell(well=True, steps=[steps], where="a.py:3", probes={}) for steps in (40, 40, 39)]
    (found,) = Judge(3).farewells(ends)
    assert (found.code, found.rank, found.step, found.where) == ("steps-differ", 2, 39, "a.py:3")
    assert Judge(3).farewells([*ends[:2], replace(ends[2], well=False)]) == []  # stopped, and that is told elsewhere


def passed(indices: range | list[int], rows: str = "", sampler: str = "RandomSampler", **more: object) -> Pass:
    shown = {str(i): f"row {i} {rows}" for i in list(indices)[:3]}
    one = Pass(key="a.py:7#1", number=0, size=64, sampler=sampler, indices="", again=0, steps=2, rows=shown)
    return replace(one, indices=seen.packed(list(indices)), **more)


@pytest.mark.parametrize(
    ("first", "other", "is_found"),
    [
        (passed(range(32)), passed(range(32)), True),
        (passed(range(32)), passed(range(32, 64)), False),
        (passed(range(32)), passed(range(32), "of another dataset"), False),
        (passed(range(32)), passed(range(32), steps=1), False),  # an evaluation before a step
        (passed(range(32), again=4), passed(range(32)), False),  # drawn with repeats by a sampler's nature
        (passed(range(32)), passed(range(32), size=63), False),
        (passed(range(32), "", "DistributedSampler"), passed([*range(32, 63), 0], "", "DistributedSampler"), False),
        (passed(range(32), "", "DistributedSampler"), passed(range(32), "randomly cut", "DistributedSampler"), True),
    ],
)
def test_samples_may_come_to_one_rank_only_but_for_padding(first: Pass, other: Pass, is_found: bool) -> None:
    found = seen.Seen(2).add([[first], [other]])
    assert (found is not None) is is_found
    if found is not None:
        assert (found.code, found.where) == ("samples-repeated", "a.py:7")


def test_letters_survive_their_journey() -> None:
    letter, _ = told(16, passes=[passed([5, 3])])
    again = read_letter(written(letter))
    assert again == letter
    assert seen.unpacked(again.passes[0].indices).tolist() == [5, 3]


@pytest.fixture
def posts() -> list[Post]:
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))
    return [Post(store, rank, 2) for rank in range(2)]


def test_rank_0_compares_when_all_letters_of_a_step_are_there_and_leaves_none_behind(posts: list[Post]) -> None:
    zero, one = posts
    zero.send(*told(0))
    assert zero.received() is None
    one.send(*told(0, "b"))
    zero.hurry()
    received = zero.received()
    assert received is not None
    letters, details = received
    assert [letter.parameters for letter in letters] == ["a", "b"]
    assert [detail.parameters for rank in (0, 1) if (detail := details(rank))] == [{"0.weight": "a"}, {"0.weight": "b"}]
    zero.forget(letters)
    assert zero._store.num_keys() == 0


def test_a_rank_that_is_far_ahead_keeps_a_bounded_number_of_letters(posts: list[Post]) -> None:
    zero, one = posts
    for number in range(3 * KEPT):
        one.send(*told(number * EVERY))
    assert one._store.num_keys() == 2 * KEPT
    zero.send(*told(0))
    assert zero.received() is None  # its place holds a later one
    assert zero._pending.maxlen == KEPT


def test_a_rank_that_never_comes_is_looked_for_ever_more_seldom(posts: list[Post]) -> None:
    zero, _ = posts
    zero.send(*told(0))
    looks = 0
    for _ in range(1000):
        looks += zero._rests == 0
        assert zero.received() is None
    assert looks < 30


def test_rank_0_waits_for_no_end_after_one_of_its_own_that_was_not_well(posts: list[Post]) -> None:
    assert posts[0].part(Farewell(well=False, steps=[], where="", probes={})) is None


RUNS = {  # script -> code, and a text of the culprit's line
    "weights-loaded-on-rank-0/buggy.py": ("initial-state-differs", "DDP("),
    "sampler-forgotten/buggy.py": ("samples-repeated", "shuffle=True"),
    "healthy/gan.py": (None, ""),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Lazily[tuple[subprocess.CompletedProcess[str], Path]]:
    """Every script under `samestep run --check`, with its run directory."""
    folder = tmp_path_factory.mktemp("checked")

    def run(name: str) -> tuple[subprocess.CompletedProcess[str], Path]:
        place = folder / name.partition("/")[0]
        command = [sys.executable, "-m", "samestep", "run", "-n", "2", "--check", "--run-dir", place]
        command += ["--json", f"{place}.json", ZOO / name]
        return subprocess.run(command, capture_output=True, text=True, check=False), place

    return Lazily(run)


@pytest.mark.parametrize("name", RUNS)
def test_a_training_goes_on_and_what_differs_is_told_with_its_line(
    runs: Lazily[tuple[subprocess.CompletedProcess[str], Path]], name: str
) -> None:
    done, place = runs[name]
    code, text = RUNS[name]
    path = place / "findings.jsonl"
    findings = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert done.returncode == (0 if code is None else 1), done.stderr
    told = json.loads(Path(f"{place}.json").read_text(encoding="utf-8"))
    assert (told["exit"], told["failure"], told["ranks"]) == (done.returncode, None, 2)
    assert (told["verdict"], told["findings"]) == ("inconclusive" if code is None else "different", findings)
    assert told["steps"] > 0
    assert [one["code"] for one in findings] == ([] if code is None else [code])
    assert ("--check: nothing found in " if code is None else "--check: 1 finding in ") in done.stderr
    if code is not None:
        file, _, line = findings[0]["where"].rpartition(":")
        assert text in Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1]
        assert f"ERROR {code}" in done.stderr
