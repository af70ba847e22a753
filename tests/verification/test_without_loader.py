"""Scripts that draw or cut their samples by themselves, without a DataLoader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from journals import Event, chance_findings, record, step, stepped, trained, wrap
from lazily import Lazily

import samestep
from samestep import Report
from samestep.verification import numerics
from samestep.verification.findings import Finding
from samestep.verification.journal import value_path
from samestep.verification.judging import average, chance, own_pace, samples, unloaded
from samestep.verification.judging.others import Others
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.judging.reference import Comparison, is_nearer
from samestep.verification.recording.chance import joined_draws
from samestep.verification.recording.own_gradients import OwnGradients
from samestep.verification.reference.replay import Replay
from samestep.verification.runs import Ended

ONE, OTHER = torch.tensor([1.0, 2.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 3.0, -1.0])  # of each rank's samples
MEAN = (ONE + OTHER) / 2


def inputs(*windows: Sequence[str]) -> list[Event]:
    """What a model gets: rows of each window."""
    return [
        {"kind": "input", "window": window, "rows": list(rows), "numbers": len(rows)}
        for window, rows in enumerate(windows)
    ]


def clip(norm: float, most: float) -> list[Event]:
    about = {"window": 0, "where": "train.py:28"}
    return [{"kind": "clipping", **about}, {"kind": "clip", "norm": norm, "most": most, **about}]


def ranks(
    folder: Path, gradient: torch.Tensor, *rows: list[Event], steps: int = 1, more: Sequence[Event] = ()
) -> Record:
    """Ranks whose models get these rows, and whose optimizers get this gradient."""
    first = trained(folder, [gradient] * steps, more).record.ranks[0].events
    start = {"kind": "start", "parameters": {"w": "0"}, "buffers": {}}
    others = [{**event, "kept": None} for event in first]
    return Record(folder, [Rank(i, [start, *own, *(others if i else first)]) for i, own in enumerate(rows)])


A, B = inputs(["a"]), inputs(["b"])


def mean(count: float = 8.0, **more: Any) -> Event:
    term = {"factor": 1.0, "mean": True, "count": count, "shape": [8, 3], **more}
    return {"kind": "backward", "window": 0, "where": "train.py:25", "terms": [term]}


def with_own(folder: Path, used: torch.Tensor, own: Sequence[torch.Tensor], losses: Sequence[Event]) -> Record:
    """Ranks whose optimizers get the gradient `used`, and whose backward passes have brought these."""
    ours = one_step(folder, used, losses)
    for rank, gradient in zip(ours.ranks, own, strict=True):
        value_path(folder, rank.number, 9).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": gradient}, value_path(folder, rank.number, 9))
    return Record(
        folder,
        [
            Rank(rank.number, [{**one, "own": 9} if one["kind"] == "step" else one for one in rank.events])
            for rank in ours.ranks
        ],
    )


@pytest.mark.parametrize(
    ("used", "losses", "said"),
    [
        (MEAN, [mean(), mean()], "agrees as declared"),
        (0.7 * ONE + 0.3 * OTHER, [mean(7.0), mean(3.0)], "agrees as declared"),
        (MEAN, [mean(7.0), mean(3.0)], "gradient-differs"),  # a mean of means
        (ONE + OTHER, [mean(), mean()], "gradient-scale"),
        (ONE + OTHER, [mean(factor=0.5)] * 2, "agrees as declared"),  # each loss is divided by the number of ranks
        (MEAN, [mean(factor=0.5)] * 2, "not checked"),  # that, and averaged: or a weight of the loss
        (MEAN, [mean(factor=0.1)] * 2, "agrees as declared"),
        (3 * MEAN, [mean(factor=0.1)] * 2, "not checked"),  # by a number that one process may have, too
        (MEAN, [mean(mean=False, count=None)] * 2, "not checked"),
        (MEAN, [mean(shape=[8, 16])] * 2, "not checked"),  # similarities of all pairs in a batch
        (torch.tensor([5.0, -1.0, 1.0, 7.0]), [mean(), mean()], "not checked"),  # changed behind the backward pass
        (0 * ONE, [mean(), mean()], "not checked"),
    ],
    ids=["mean", "by values", "of means", "sum", "divided", "twice", "weight", "else", "sums", "pairs", "other", "0"],
)
def test_the_average_of_what_each_rank_computes_is_judged_by_the_losses(
    tmp_path: Path, used: torch.Tensor, losses: list[Event], said: str
) -> None:
    own = [ONE, OTHER] if used.any() else [used, used]
    ours, report = with_own(tmp_path, used, own, losses), Report(ranks=2)
    average.judge(ours, ours.ranks[0].steps, report)
    assert [one.code for one in report.errors] == ([said] if said.startswith("gradient") else [])
    assert report.errors or report.coverage["gradients"].partition(":")[0] == said


@pytest.mark.parametrize(("times", "code"), [(2.0, "gradient-scale"), (1.0, None), (1.7, None)])
def test_a_tensor_that_is_added_up_once_more_than_the_others_is_found(
    tmp_path: Path, times: float, code: str | None
) -> None:
    """A tied weight that is reduced as a parameter of two modules; other factors may be meant."""
    ours, report = with_own(tmp_path, MEAN, [ONE, OTHER], [mean(), mean()]), Report(ranks=2)
    for rank, own in enumerate((ONE, OTHER)):
        torch.save({name: own.repeat(3) for name in "vwx"}, value_path(tmp_path, rank, 9))
    used = {"v": MEAN.repeat(3), "w": times * MEAN.repeat(3), "x": MEAN.repeat(3)}
    torch.save(used, value_path(tmp_path, 0, 0))
    average.judge(ours, ours.ranks[0].steps, report)
    assert [(one.code, one.tensor) for one in report.errors] == ([] if code is None else [(code, "w")])


def test_a_gradient_that_is_clipped_behind_the_average_is_right(tmp_path: Path) -> None:
    for name, most in (("right", 1.0), ("wrong", 0.5)):
        report = Report(ranks=2)
        ours = with_own(tmp_path / name, 0.1 * MEAN, [ONE, OTHER], [mean(), mean()])
        ours.ranks[0].events[1:1] = clip(10.0, most)
        average.judge(ours, ours.ranks[0].steps, report)
        assert [one.code for one in report.errors] == ([] if most == 1.0 else ["gradient-scale"])


@pytest.mark.parametrize("is_before", [True, False])
def test_what_ranks_bring_together_before_the_loss_leaves_it_open(tmp_path: Path, *, is_before: bool) -> None:
    """Advantages are standardised over all ranks; an average of gradients comes behind the backward pass."""
    brought: Event = {"kind": "collective", "window": 0, "op": "all_reduce", "where": "train.py:20"}
    ours, report = with_own(tmp_path, MEAN, [ONE, OTHER], [mean(), mean()]), Report(ranks=2)
    ours.ranks[0].events.insert(0 if is_before else 1, brought)
    average.judge(ours, ours.ranks[0].steps, report)
    assert report.errors == []
    assert ("what the ranks bring together at train.py:20" in report.coverage["gradients"]) == is_before


@pytest.mark.parametrize(
    ("own", "said"), [(["a", "b", "c"], "agrees"), (["a", "b", "d"], "not checked"), ([], "not checked")]
)
def test_samples_without_a_loader_are_those_that_one_process_uses(own: list[str], said: str) -> None:
    report = Report(ranks=2)
    ours, whole = record(inputs(["a", "b"]), inputs(["c"])), record(inputs(["a", "b"]))
    unloaded.judge(ours, whole, lambda: record(inputs(own)), report)
    assert report.coverage["data"].partition(":")[0] == said


@pytest.mark.parametrize(("shared", "codes"), [([], []), (["b"], ["samples-repeated"])], ids=["anchors", "shared"])
def test_rows_that_come_at_every_step_are_in_no_rank_s_part(shared: list[str], codes: list[str]) -> None:
    """Anchors, or points of a boundary, beside the samples of a step."""
    trains: list[Event] = [{"kind": "backward", "window": 0, "where": "train.py:25"}, step(0, "g"), stepped(0)]
    parts = [(["a", "b"], ["c"], ["a"]), (["d", *shared], ["e"], ["d"])]
    ours = record(*([*inputs(*(["x", *rows] for rows in part)), *trains] for part in parts))
    alone = record(inputs(["x", *"abdf"], ["x", *"ceghij"], ["x", "a"]))
    report = Report(ranks=2)
    unloaded.judge(ours, alone, lambda: alone, report)
    assert [one.code for one in report.errors] == codes


READ = [str(one) for one in range(96)]  # what one process reads


@pytest.mark.parametrize(
    ("parts", "missing"),
    [
        ([READ[::2], READ[1::2]], 0),
        ([READ[::4], READ[3::4]], 46),  # divided once more
        ([[*READ[::4], "x", "y"], [*READ[3::4], "z"]], 46),  # and so beyond what one process has read
        ([READ[:40], READ[40:80]], 0),  # a stretch each, and a tail that nobody has
        ([READ[:40], READ[4:40]], 0),
        ([READ[::4][::-1], READ[3::4][::-1]], 0),  # in an order of their own
        ([READ[:8], READ[80:88]], 0),  # too few
        ([["x", *READ[::4]], ["y", *READ[3::4]]], 0),
    ],
    ids=["cut", "twice", "beyond", "stretches", "alike", "order", "few", "others"],
)
def test_samples_that_ranks_pass_over_in_what_one_process_reads_are_counted(
    parts: list[list[str]], missing: int
) -> None:
    assert samples.passed_over(parts, READ) == missing
    trains: list[Event] = [{"kind": "backward", "window": 0, "where": "train.py:25"}, step(0, "g"), stepped(0)]
    report, ours = Report(ranks=2), record(*([*inputs(part), *trains] for part in parts))
    unloaded.judge(ours, record(inputs(READ)), lambda: record(inputs(READ)), report)
    assert [one.code for one in report.errors if one.code == "samples-missing"] == ["samples-missing"] * bool(missing)


def test_samples_that_ranks_leave_out_of_whole_passes_are_counted_in_any_order() -> None:
    """Workers bring them in another order there."""
    parts = [READ[::4][::-1], READ[3::4][::-1]]
    assert samples.passed_over(parts, READ, tail=4) == 48
    assert samples.passed_over([READ[::2][::-1], READ[1::2]], READ, tail=4) == 0
    assert samples.passed_over([[f"{row}'" for row in part] for part in parts], READ, tail=4) == 0  # augmented


@pytest.mark.parametrize(
    ("digests", "shape", "said"),
    [(("x", "y"), [4], "agrees as declared"), (("x", "x"), [4], "not checked"), (("x", "y"), [8], "not checked")],
    ids=["apart", "alike", "fewer"],
)
def test_samples_that_each_rank_draws_as_one_process_does_are_declared(
    digests: tuple[str, str], shape: list[int], said: str
) -> None:
    drawn: Event = {
        "kind": "draw",
        "place": "0|train.py:4|1",
        "name": "torch.randint",
        "shape": [4],
        "within": False,
        "trains": True,
    }
    ours = record(*([{**drawn, "digest": one}, *inputs(["a"])] for one in digests))
    whole, report = record([{**drawn, "kind": "own_draw", "shape": shape}]), Report(ranks=2)
    unloaded.judge(ours, whole, lambda: record(inputs(["b"])), report)
    assert report.coverage["data"].partition(":")[0] == said


def test_hooks_see_what_backward_passes_bring_before_anything_is_averaged() -> None:
    layer, wanted = torch.nn.Linear(3, 2), [True]
    own = OwnGradients(lambda: wanted[0])
    own.watch(layer.parameters())
    named = dict(layer.named_parameters())
    for _ in range(2):  # micro-batches add up
        layer(torch.ones(4, 3)).sum().backward()
    for one in layer.parameters():
        assert one.grad is not None
        one.grad.mul_(7.0)  # an average, say
    found = own.of(named, scale=2.0)
    assert found is not None
    assert found["bias"] is not None
    assert found["bias"].tolist() == [4.0, 4.0]
    layer.zero_grad()  # what came before does not count
    layer(torch.ones(1, 3)).sum().backward()
    again = own.of(named, scale=1.0)
    assert again is not None
    assert again["bias"] is not None
    assert again["bias"].tolist() == [1.0, 1.0]
    own.forget()
    assert own.of(named, scale=1.0) is None


@pytest.mark.parametrize(("factor", "codes"), [(1.0, []), (0.5, ["gradient-scale"])])
def test_gradients_of_one_process_tell_that_its_samples_are_those_of_the_ranks(
    tmp_path: Path, factor: float, codes: list[str]
) -> None:
    """Rows of a batch that is padded otherwise are other rows; a gradient with eight numbers is none of others."""
    gradient = torch.arange(1.0, 10.0)
    ours, report = ranks(tmp_path / "ranks", factor * gradient, A, B), Report(ranks=2)
    whole = trained(tmp_path / "whole", [gradient], inputs(["a and b, padded"]))
    Comparison(ours, whole, Others(lambda: whole, list)).judge(report)
    assert [one.code for one in report.errors] == codes
    assert report.coverage["gradients"] == ("differs" if codes else "agrees")


def one_step(folder: Path, gradient: torch.Tensor, losses: Sequence[Event]) -> Record:
    """Of ranks with these backward passes."""
    first = trained(folder, [gradient]).record.ranks[0].events
    events = [event for event in first if event["kind"] != "backward"]
    return Record(
        folder,
        [
            Rank(i, [loss, *({**one, **({"kept": None} if i and "kept" in one else {})} for one in events)])
            for i, loss in enumerate(losses)
        ],
    )


def in_turns(folder: Path, *gradients: torch.Tensor) -> Run:
    """One process that takes these steps for one of the ranks'."""
    run = trained(folder, gradients)
    events = [{**one, "event": 0} for one in run.record.ranks[0].of("step")]
    return replace(run, record=Record(folder, [Rank(0, events)]))


@pytest.mark.parametrize(
    ("weights", "losses", "said"),
    [
        ((0.5, 0.5), [mean(), mean()], "agrees as declared"),
        ((0.7, 0.3), [mean(7.0), mean(3.0)], "agrees as declared"),  # the script weighs its ranks
        ((0.5, 0.5), [mean(7.0), mean(3.0)], "not checked"),  # and here it does not
        ((0.5, 0.5), [mean(mean=False, count=None)] * 2, "not checked"),  # a sum leaves it open
        ((0.5, 0.5), [mean(shape=[8, 16])] * 2, "not checked"),  # similarities of all pairs in a batch
        ((1.0, 1.0), [mean(), mean()], "differs"),
        ((0.25, 0.25), [mean(), mean()], "differs"),
        ((0.2, 0.2), [mean(), mean()], "agrees as declared"),
        ((0.7, 0.6), [mean(7.0), mean(3.0)], "not checked"),
    ],
    ids=[
        "means",
        "weighed",
        "other counts",
        "sums",
        "pairs",
        "not divided",
        "divided twice",
        "clipped by hand",
        "neither",
    ],
)
def test_one_process_that_takes_a_step_for_each_rank_s_decides(
    tmp_path: Path, weights: tuple[float, float], losses: list[Event], said: str
) -> None:
    ours = one_step(tmp_path / "ranks", weights[0] * ONE + weights[1] * OTHER, losses)
    run = in_turns(tmp_path / "single", ONE, OTHER)
    report = Report(ranks=2)
    is_told = average.judge_in_turn(ours, run, ours.ranks[0].steps, report)
    assert report.coverage.get("gradients", "not checked") == said
    assert is_told == (said != "not checked")
    assert [(one.code, one.factor, one.where) for one in report.errors] == (
        [("gradient-scale", sum(weights), "train.py:25")] if said == "differs" else []
    )


def test_one_process_with_other_samples_decides_nothing(tmp_path: Path) -> None:
    ours = one_step(tmp_path / "ranks", MEAN, [mean(), mean()])
    run = in_turns(tmp_path / "single", ONE, torch.tensor([5.0, -1.0, 2.0, 2.0]))
    assert not average.judge_in_turn(ours, run, ours.ranks[0].steps, Report(ranks=2))


# --- samples that come again, or never ---


@pytest.mark.parametrize(
    ("first", "other", "code"),
    [
        ((["a"], ["b"], ["c"]), (["b"], ["c"], ["d"]), "samples-repeated"),
        ((["a"], ["c"], ["e"]), (["b"], ["d"], ["f"]), None),
    ],
    ids=["goes on by one rank's", "goes on by all ranks'"],
)
def test_a_reader_that_goes_on_by_the_samples_of_one_rank_is_found(
    first: tuple[list[str], ...], other: tuple[list[str], ...], code: str | None
) -> None:
    """Where one process does not meet a sample again at its next step."""
    report = Report(ranks=2)
    ours = record([*inputs(*first), step(0, "g")], [*inputs(*other), step(0, "g")])
    alone = record([*inputs(["a", "b"], ["c", "d"], ["e", "f"])])
    unloaded.judge(ours, alone, lambda: alone, report)
    assert [one.code for one in report.errors] == ([] if code is None else [code])


@pytest.mark.parametrize(
    ("mine", "alone", "is_found"),
    [
        ((["a", "b"], ["a", "b"]), (["a", "b", "c", "y", "z"],) * 2, True),
        ((["a", "b"], ["a", "b"]), (["a", "b", "c", "z"],) * 2, False),
        ((["a", "b"], ["a", "b"]), (["a", "b", "c", "y", "z"], ["b"]), False),
        ((["a", "q"], ["a", "q"]), (["a", "b", "c", "y", "z"],) * 2, False),
    ],
    ids=["left out", "the rest of equal parts", "other batches", "others"],
)
def test_samples_of_one_batch_that_are_in_no_part_are_found(
    mine: tuple[list[str], ...], alone: tuple[list[str], ...], *, is_found: bool
) -> None:
    ours = record([*inputs(*mine), step(0, "g")], [*inputs(["c"], ["c"]), step(0, "g")])
    found = unloaded.left_out_of_one_batch(ours, record([*inputs(*alone)]))
    assert (found is not None and found.code == "samples-missing") == is_found


# --- samples that ranks have in common ---


def told(folder: Path, *rows: list[Event], own: tuple[torch.Tensor, torch.Tensor] = (ONE, ONE)) -> Finding | None:
    ours = ranks(folder, MEAN, *rows, steps=2)
    for rank, gradient in zip(ours.ranks, own, strict=True):
        value_path(folder, rank.number, 9).parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": gradient}, value_path(folder, rank.number, 9))
        rank.events[:] = [{**one, "own": 9} if one["kind"] == "step" else one for one in rank.events]
    return unloaded.same_on_two_ranks(ours, trained(folder / "alone", []), ours.ranks[0].steps)


@pytest.mark.parametrize(("is_wrapped", "severity"), [(True, "error"), (False, "note")])
def test_ranks_that_train_on_the_same_samples_at_every_step_are_an_error(
    tmp_path: Path, *, is_wrapped: bool, severity: str
) -> None:
    """Unless nothing is averaged: then each trains the whole model by itself."""
    rows = [*([wrap("w")] if is_wrapped else []), *inputs(["a", "b"], ["c", "d"])]
    found = told(tmp_path, rows, rows)
    assert found is not None
    assert (found.code, found.severity, found.property, found.rank) == ("samples-repeated", severity, "data", 1)


def test_ranks_of_a_tensor_parallel_group_share_a_batch(tmp_path: Path) -> None:
    """They hold parts of the same parameters, and one of them stands for all."""
    rows = inputs(["a", "b"], ["c", "d"])
    ours = ranks(tmp_path / "ranks", MEAN, rows, rows, steps=2)
    cut = Record(
        ours.folder,
        [
            Rank(i, [{"kind": "start", "parameters": {"w": f"0:2@{i} 0"}, "buffers": {}}, *rank.events[1:]])
            for i, rank in enumerate(ours.ranks)
        ],
    )
    assert cut.is_cut
    assert unloaded.same_on_two_ranks(cut, trained(tmp_path / "alone", [], rows), cut.ranks[0].steps) is None


def test_one_fixed_batch_is_a_note(tmp_path: Path) -> None:
    rows = inputs(["a", "b"], ["a", "b"])
    found = told(tmp_path, rows, rows)
    assert found is not None
    assert found.severity == "note"


@pytest.mark.parametrize(
    ("first", "other", "own"),
    [
        (inputs(["a"], ["b"]), inputs(["c"], ["d"]), (ONE, OTHER)),
        (inputs(["a"], ["b"]), inputs(["a"], ["c"]), (ONE, ONE)),  # once by chance
        (inputs(["a"], ["b"]), inputs(["a"], ["b"]), (ONE, OTHER)),  # each takes its part of the batch in the model
        (inputs([], []), inputs([], []), (ONE, ONE)),  # not known
        (inputs(["a"], ["b"]), inputs(["a"], ["b"]), (0 * ONE, 0 * ONE)),
    ],
)
def test_what_is_no_repetition(
    tmp_path: Path, first: list[Event], other: list[Event], own: tuple[torch.Tensor, torch.Tensor]
) -> None:
    assert told(tmp_path, first, other, own=own) is None


# --- draws ---


def test_one_process_gets_what_a_rank_has_drawn() -> None:
    whole = joined_draws("torch.randn", torch.zeros(2), [torch.ones(2)])
    assert whole is not None
    assert whole.tolist() == [1, 1]
    assert joined_draws("torch.randn", torch.zeros(2), [torch.ones(3)]) is None


def test_what_is_drawn_before_the_samples_are_there_is_no_noise() -> None:
    """It may be the samples, which are judged by what the models get."""
    drawn: dict[str, Any] = {"kind": "draw", "place": "3|train.py:4|0", "digest": "d", "name": "torch.randn"}
    drawn |= {"shape": [64], "within": False, "trains": True}
    ours, report = record([drawn], [drawn]), Report(ranks=2)
    ended = Ended(code=0, hung=False, failure=None, folder=ours.folder)
    chance.judge(ours, Run(ended, record([])), report)
    assert report.findings == []
    assert "the script draws nothing itself" not in report.coverage["random"]


def drawn(place: str, *, digest: str = "", name: str = "torch.randn", shape: list[int], trains: bool = True) -> Event:
    about: Event = {"kind": "draw", "place": place, "digest": digest or place, "name": name, "shape": shape}
    return {**about, "within": False, "trains": trains}


@pytest.mark.parametrize(
    ("alone", "windows", "name", "codes"),
    [
        ([64, 4], [2, 3], "torch.randn", ["random-streams"]),
        ([32, 4], [2, 3], "torch.randn", []),  # noise for the whole batch, of which each rank takes its part
        ([64, 4], [2], "torch.randn", []),  # parameters, say
        ([64, 4], [2, 3], "torch.randint", []),  # places in each rank's own samples
    ],
)
def test_equal_noise_of_which_one_process_draws_more_is_found(
    alone: list[int], windows: list[int], name: str, codes: list[str]
) -> None:
    """A generator that all ranks seed alike draws the places of the whole batch, and the noise of each part."""
    places = [f"{window}|train.py:4|1" for window in windows]
    theirs: list[Event] = [drawn(place, name=name, shape=[32, 4]) for place in places]
    own: list[Event] = [{"kind": "own_draw", "place": place, "shape": alone} for place in places]
    found = chance_findings(record(theirs, theirs), *own)
    assert [one.code for one in found] == codes
    assert not found or (found[0].step, found[0].where, found[0].severity) == (2, "train.py:4", "error")


def test_equal_noise_of_which_one_process_draws_more_often_is_found() -> None:
    """Perturbations that each rank numbers from 0 on, say."""
    places = [f"{window}|train.py:4|{number}" for window in (2, 3) for number in (1, 2, 3, 4)]
    theirs: list[Event] = [drawn(place, shape=[16]) for place in places if not place.endswith(("3", "4"))]
    own: list[Event] = [{"kind": "own_draw", "place": place, "shape": [16]} for place in places]
    assert [one.code for one in chance_findings(record(theirs, theirs), *own)] == ["random-streams"]
    assert chance_findings(record(theirs, theirs), *own[:2], *own[4:6]) == []


@pytest.mark.parametrize(("is_training", "codes"), [(True, ["random-streams"]), (False, [])])
def test_noise_that_is_no_longer_apart_is_found(is_training: bool, codes: list[str]) -> None:
    """Single numbers count together; those of an evaluation are others than those of the training."""
    ranks: list[list[Event]] = [[], []]
    for window in range(4):
        for rank, events in enumerate(ranks):
            for number in range(1, 21):
                digest = f"{window} {number} {rank if window < 2 else 'both'}"
                trains = is_training or window < 2
                place = f"{window}|train.py:4|{number}"
                events.append(drawn(place, digest=digest, shape=[], trains=trains))
    found = chance_findings(record(*ranks))
    assert [one.code for one in found] == codes
    assert not found or (found[0].step, found[0].where) == (2, "train.py:4")


def test_what_is_drawn_before_the_first_batch_of_a_loader_is_neither() -> None:
    drawn: dict[str, Any] = {"kind": "draw", "place": "-1|train.py:4|0", "digest": "d", "name": "torch.randn"}
    drawn |= {"shape": [64], "within": False, "trains": True}
    loaded = {"kind": "batch", "key": "train.py:9#1", "number": 0, "training": True}
    ours, report = record([drawn, loaded], [drawn, loaded]), Report(ranks=2)
    chance.judge(ours, Run(Ended(code=0, hung=False, failure=None, folder=ours.folder), record([])), report)
    assert "the script draws nothing itself" in report.coverage["random"]


# --- whole scripts ---

BEGIN = """
import os, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""

SCRIPTS = {
    # as PyTorch's distributed/ddp/example.py: every rank draws by itself, and nobody seeds it
    "example": BEGIN
    + """
torch.seed()
for _ in range(3):
    optimizer.zero_grad()
    outputs = model(torch.randn(20, 8))
    nn.functional.mse_loss(outputs, torch.randn(20, 3)).backward()
    optimizer.step()
dist.destroy_process_group()
""",
    # with a loader for the evaluation alone
    "evaluated": BEGIN
    + """
from torch.utils.data import DataLoader, TensorDataset
generator = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(16, 8, generator=generator), torch.randn(16, 3, generator=generator))
torch.manual_seed(1 + rank)
for _ in range(2):
    for _ in range(2):
        optimizer.zero_grad()
        outputs = model(torch.randn(20, 8))
        nn.functional.mse_loss(outputs, torch.randn(20, 3)).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        print(sum(float(nn.functional.mse_loss(model.module(x), y)) for x, y in DataLoader(data, 8)))
    model.train()
dist.destroy_process_group()
""",
    # what all ranks have used together is left out of each rank's own part
    "resumed": BEGIN
    + """
data, seen = torch.randn(48, 8, generator=torch.Generator().manual_seed(1)), 0
def train(steps):
    global seen
    rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(2))[rank::size]
    rows = rows[seen:]
    for part in rows.split(8 // size)[:steps]:
        optimizer.zero_grad()
        model(data[part]).square().mean().backward()
        optimizer.step()
        seen += len(part) * size
train(2)
if rank == 0:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": seen}, "last.pt")
dist.barrier()
state = torch.load("last.pt")
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
seen = state["seen"]
train(9)
dist.destroy_process_group()
""",
    # plain BatchNorm of each rank's samples, which are every other one of the batch
    "normalised": BEGIN
    + """
data = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    for part in order.split(12):
        x = data[part[rank::size]]
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
dist.destroy_process_group()
""",
    # as nanoGPT: the next batch is drawn between forward and backward, micro-batches are divided among the ranks
    "ahead": BEGIN
    + """
data = torch.randn(500, 8, generator=torch.Generator().manual_seed(1))
def batch():
    return torch.stack([data[i] for i in torch.randint(len(data), (6,))])
torch.manual_seed(1337 + SEED)
x = batch()
for step in range(3):
    for micro in range(4 // size):
        model.require_backward_grad_sync = micro == 4 // size - 1
        loss = model(x).square().mean() / (4 // size)
        x = batch()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model.module(batch())  # drawn, and not trained on
dist.destroy_process_group()
""",
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    folder = tmp_path_factory.mktemp("scripts")

    def make(name: str) -> Report:
        kind, _, seed = name.partition(" ")
        (folder / f"{kind}.py").write_text(SCRIPTS[kind].replace("SEED", seed), encoding="utf-8")
        return samestep.verify(folder / f"{kind}.py")

    return Lazily(make)


@pytest.mark.parametrize("name", ["example", "evaluated", "ahead rank"])
def test_a_script_that_draws_its_samples_is_the_same(reports: Lazily[Report], name: str) -> None:
    """Alone, the script "ahead" gets what each rank has drawn, one rank after the other."""
    reports[name].require_same()
    assert reports[name].coverage["gradients"] == ("agrees" if name.startswith("ahead") else "agrees as declared")


def test_batchnorm_of_each_rank_s_samples_is_declared_without_a_loader_too(reports: Lazily[Report]) -> None:
    reports["normalised"].require_same()
    assert reports["normalised"].coverage["gradients"] == "agrees as declared"
    assert "BatchNorm statistics of each rank's samples" in reports["normalised"].margins["gradients"]


def test_a_script_that_draws_the_same_samples_on_all_ranks_is_not(reports: Lazily[Report]) -> None:
    (error,) = reports["ahead 0"].errors
    assert (error.code, error.rank) == ("samples-repeated", 1)
    assert error.where is not None
    assert "torch.randint" in SCRIPTS["ahead"].splitlines()[int(error.where.rpartition(":")[2]) - 1]


def test_the_line_that_skips_too_much_behind_a_load_is_named(reports: Lazily[Report]) -> None:
    (error,) = [one for one in reports["resumed"].errors if one.property == "data"]
    assert error.where is not None
    assert "rows[seen:]" in SCRIPTS["resumed"].splitlines()[int(error.where.rpartition(":")[2]) - 1]


def test_the_micro_batches_of_a_step_are_known_where_all_ranks_have_as_many() -> None:
    def steps(*micro: int) -> list[Event]:
        return [{"kind": "step", "event": number, "micro": each} for number, each in enumerate(micro)]

    assert record(steps(2, 2), steps(2, 2)).micro_batches == 2
    assert record(steps(2, 2), steps(2, 1)).micro_batches == 0
    assert record([], []).micro_batches == 0


@pytest.mark.parametrize(
    ("noise", "are_others"),
    [((), False), (("n", "n"), False), (("n", "m"), True)],
    ids=["none", "the same on all ranks", "each rank's own"],
)
def test_places_that_all_draw_alike_choose_the_same_samples_unless_noise_is_drawn_too(
    noise: tuple[str, ...], *, are_others: bool
) -> None:
    """Sequences that ranks cut into stretches have other rows than one process's; so have samples with other noise."""

    def draw(kind: str, name: str, digest: str, *, whole: bool) -> Event:
        return {"kind": kind, "place": f"0|train.py:9{name}|1", "digest": digest, "whole": whole, "window": 0}

    def process(kind: str, row: str, *noises: str) -> list[Event]:
        drawn = [draw(kind, "0", "places", whole=True), *(draw(kind, "1", one, whole=False) for one in noises)]
        return [*drawn, *inputs([row]), step(0, "g")]

    own = list(noise) or [None, None]
    ours = record(*(process("draw", f"part {i}", *([one] if one else [])) for i, one in enumerate(own)))
    alone = Run(Ended(code=0, hung=False, failure=None, folder=Path()), record(process("own_draw", "whole")))
    assert Comparison(ours, alone, Others(lambda: alone, list)).has_other_samples(ours.ranks[0].steps) == are_others


@pytest.mark.parametrize(
    ("drawn", "alone", "is_so"),
    [
        (("ab", "cd"), "acbd", True),
        (("ab", "ab"), "ab", False),  # all ranks draw alike: nothing is drawn for each sample
        (("ab", "cd"), "ab", False),
        (("a", "b"), "", False),
    ],
)
def test_one_process_draws_for_all_where_its_numbers_are_those_of_all_ranks(
    tmp_path: Path, drawn: tuple[str, str], alone: str, *, is_so: bool
) -> None:
    """Each environment has a generator, and their observations lie side by side: no row is one sample."""

    def draws(kind: str, digests: str) -> list[Event]:
        return [{"kind": kind, "place": f"0|train.py:4|{i}", "digest": one} for i, one in enumerate(digests)]

    ours = record(*(draws("draw", one) for one in drawn))
    whole = Run(Ended(code=0, hung=False, failure=None, folder=tmp_path), record(draws("own_draw", alone)))
    assert Comparison(ours, whole, Others(lambda: whole, list)).draws_for_all({0}) == is_so


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ([ONE, OTHER, MEAN], "agrees"),
        ([ONE, OTHER * 1.01, MEAN], None),  # its second step is another one
        ([ONE], None),  # one step tells nothing of what it has made
        ([torch.zeros(4)] * 3, None),
    ],
)
def test_gradients_of_one_process_that_goes_its_own_way(
    theirs: list[torch.Tensor], said: str | None, tmp_path: Path
) -> None:
    ours = trained(tmp_path / "ours", [ONE, OTHER, MEAN] if theirs[0].any() else theirs).record
    alone = trained(tmp_path / "alone", theirs).record
    report = Report(ranks=2)
    own_pace.judge(ours, alone, ours.kept_steps, report)
    assert report.coverage.get("gradients") == said


def moving(folder: Path, *moves: torch.Tensor) -> Record:
    """An optimizer that asks for gradients by itself: none is there, and a parameter moves."""
    events = trained(folder, [torch.zeros(4)] * len(moves)).record.ranks[0].events
    for number, move in enumerate(moves):
        state = {"parameters": {0: {"w": torch.ones(4)}}, "buffers": {}, "states": {}}
        torch.save(state, value_path(folder, 0, 10 + number))
        torch.save({"parameters": {"w": torch.ones(4) + move}, "states": {}}, value_path(folder, 0, 20 + number))
        events.append({"kind": "updated", "event": number, "kept": 20 + number, "evaluations": 0})
    kept = [{**one, "kept": 10 + one["number"]} if one["kind"] == "window" else one for one in events]
    return Record(folder, [Rank(0, kept)])


@pytest.mark.parametrize(("other", "said"), [(ONE, "agrees"), (1.01 * ONE, None)])
def test_steps_of_one_process_that_goes_its_own_way_stand_for_gradients_that_nobody_sees(
    other: torch.Tensor, said: str | None, tmp_path: Path
) -> None:
    ours, alone, report = (
        moving(tmp_path / "ours", ONE, OTHER),
        moving(tmp_path / "alone", other, OTHER),
        Report(ranks=2),
    )
    own_pace.judge(ours, alone, ours.kept_steps, report)
    assert report.coverage.get("gradients") == said


def beginning(folder: Path, gradients: list[torch.Tensor], parameters: list[torch.Tensor]) -> Record:
    """A process that has kept the parameters that its steps begin with, too."""
    events = trained(folder, gradients).record.ranks[0].events
    for number, parameter in enumerate(parameters):
        state = {"parameters": {0: {"w": parameter}}, "buffers": {}, "states": {}}
        torch.save(state, value_path(folder, 0, 10 + number))
    kept = [{**one, "kept": 10 + one["number"]} if one["kind"] == "window" else one for one in events]
    return Record(folder, [Rank(0, kept)])


@pytest.mark.parametrize(
    ("first", "second", "begun", "is_found"),
    [
        (ONE, MEAN, ONE, True),
        (OTHER, MEAN, ONE, False),  # one process has other samples from the beginning
        (ONE, OTHER * (1 + 1e-3), ONE, False),  # what rounding may have made of it
        (ONE, MEAN, 2 * ONE, False),  # another step was made of the first gradient
    ],
)
def test_gradients_that_part_from_one_process_behind_equal_steps_are_found(
    first: torch.Tensor, second: torch.Tensor, begun: torch.Tensor, tmp_path: Path, *, is_found: bool
) -> None:
    """Observations are standardised with statistics that each rank gathers by itself: none before the first step."""
    ours = beginning(tmp_path / "ours", [ONE, OTHER], [ONE, ONE])
    alone = beginning(tmp_path / "alone", [first, second], [ONE, begun])
    report = Report(ranks=2)
    own_pace.judge(ours, alone, ours.kept_steps, report)
    assert [(one.code, one.step) for one in report.errors] == [("gradient-differs", 1)] * is_found


@pytest.mark.parametrize(("window", "is_found"), [(0, True), (1, False)])
def test_gradients_do_not_part_where_a_later_step_draws_what_the_first_does_not(
    window: int, tmp_path: Path, *, is_found: bool
) -> None:
    """Noise that begins with the second step may be each rank's own."""
    ours = beginning(tmp_path / "ours", [ONE, OTHER], [ONE, ONE])
    alone = beginning(tmp_path / "alone", [ONE, MEAN], [ONE, ONE])
    ours.ranks[0].events.append({"kind": "draw", "place": f"{window}|train.py:20|1", "digest": "x"})
    report = Report(ranks=2)
    own_pace.judge(ours, alone, ours.kept_steps, report)
    assert bool(report.errors) == is_found


def given(windows: list[str]) -> list[Event]:
    """A process whose model gets these rows, a letter each, in its windows."""
    return [
        {"kind": "input", "window": window, "rows": list(rows), "numbers": len(rows)}
        for window, rows in enumerate(windows)
    ]


@pytest.mark.parametrize(
    ("ranks", "alone", "is_found"),
    [
        (
            (["abcx", "ijkl", "qrst"], ["efgy", "mnop", "uvwz"]),
            ["abcdefgh", "ijklmnop", "qrstuvwz"],
            False,
        ),  # by chance
        ((["abxy", "ijkl", "qrst"], ["efzw", "mnop", "uvAB"]), ["abcdefgh", "ijklmnop", "qrstuvCD"], True),
        ((["abcd", "efgh", "ijkl"], ["mnop", "qrst", "uvwx"]), ["abcdefgh", "ijklABCD", "EFGHIJKL"], False),  # an order
        ((["abcd", "efgh"] * 2, ["ijkl", "mnop"] * 2), ["abcdefgh", "ijklmnop"] * 2, False),  # another order
        ((["aabb"] * 4, ["ccxx"] * 4), ["aabbccdd"] * 4, False),  # fewer than drop_last may leave out: two
        ((["aabb"] * 4, ["xxyy"] * 4), ["aabbccdd"] * 4, True),
        ((["abcd"] * 4, ["efgh"] * 4), ["abcdefghi"] * 4, False),  # another number of rows
        ((["AB", "CD", "CD", "AB"], ["EF", "GH", "EF", "GH"]), ["abcd", "efgh", "efgh", "abcd"], True),  # in two epochs
        ((["ab", "cd", "cd", "ab"], ["ef", "gh", "ef", "gh"]), ["abcd", "efgh", "efgh", "abcd"], False),
        ((["AB", "CD", "xy", "zw"], ["EF", "GH", "vu", "ts"]), ["abcd", "efgh", "efgh", "abcd"], False),  # drawn anew
    ],
)
def test_rows_that_one_process_does_not_get_are_found_where_a_gradient_parts(
    ranks: tuple[list[str], list[str]], alone: list[str], monkeypatch: pytest.MonkeyPatch, *, is_found: bool
) -> None:
    first = {**step(0, "g"), "kept": 0}
    apart = own_pace.Parting(None, first, first, numerics.Distance(1.0, "w", 1.0, {}))
    monkeypatch.setattr(own_pace, "parting", lambda *_: apart)
    backward: Event = {"kind": "backward", "window": 0, "where": "train.py:25"}
    ours = record(*([backward, first, *given(one)] for one in ranks))
    found = unloaded.other_rows(ours, record(given(alone)))
    assert (None if found is None else (found.code, found.where)) == (
        ("batches-differ", "train.py:25") if is_found else None
    )


def test_rows_of_ranks_that_draw_apart_may_be_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first = {**step(0, "g"), "kept": 0}
    apart = own_pace.Parting(None, first, first, numerics.Distance(1.0, "w", 1.0, {}))
    monkeypatch.setattr(own_pace, "parting", lambda *_: apart)
    rows = ["aabb"] * 4, ["xxyy"] * 4
    draws: list[Event] = [{"kind": "draw", "place": "0|train.py:9|1", "digest": one} for one in "ab"]
    ours = record(*([first, draw, *given(one)] for one, draw in zip(rows, draws, strict=True)))
    assert unloaded.other_rows(ours, record(given(["aabbccdd"] * 4))) is None


@pytest.mark.parametrize(("second", "told"), [(["train.py:5"], "train.py:5"), ([], None), (None, "train.py:5")])
def test_what_an_evaluation_before_the_first_step_brings_together_is_no_part_of_the_loss(
    second: list[str] | None, told: str | None
) -> None:
    def window(number: int, places: list[str]) -> list[Event]:
        calls: list[Event] = [
            {"kind": "collective", "op": "all_reduce", "window": number, "where": where} for where in places
        ]
        return [*calls, {"kind": "backward", "window": number, "where": "train.py:9"}, step(number, "g")]

    events = window(0, ["train.py:5"]) + ([] if second is None else window(1, second))
    rank = Rank(0, events)
    assert average.brings_together(rank, rank.steps) == told


@pytest.mark.parametrize(("rows", "theirs", "is_found"), [(8, "d", True), (4, "d", False), (8, "other", False)])
def test_numbers_that_all_ranks_draw_for_the_whole_batch_are_seen(rows: int, theirs: str, is_found: bool) -> None:
    """Each takes drawn[rank::world_size] of them, or a block: which of these, gradients tell."""
    batch: Event = {"kind": "batch", "training": True, "window": 3, "size": 4}
    ranks = [[batch, drawn("3|train.py:4|1", digest=digest, shape=[rows, 2])] for digest in ("d", theirs)]
    own: Event = {"kind": "own_draw", "place": "3|train.py:4|1", "digest": "d", "shape": [rows, 2]}
    ours = record(*ranks)
    alone = Run(Ended(code=0, hung=False, failure=None, folder=ours.folder), record([own]))
    assert chance.draw_for_all_rows(ours, alone) is is_found


def test_rows_that_are_drawn_in_turn_follow_the_joined_batch() -> None:
    alone: Any = Replay.__new__(Replay)
    alone.sizes, alone._permuted, alone.window = [3, 3], False, 1
    assert alone._rows_drawn_for(strided=False).tolist() == [0, 1, 2, 3, 4, 5]
    assert alone._rows_drawn_for(strided=True).tolist() == [0, 2, 4, 1, 3, 5]
    alone._permuted = True
    order = alone._order(alone.sizes)
    assert alone._rows_drawn_for(strided=True).tolist() == torch.tensor([0, 2, 4, 1, 3, 5])[order].tolist()


@pytest.mark.parametrize(("ranks", "begins"), [([[3, 1], [3, 1]], True), ([[3, 1], [4, 1]], False), ([[3, 1]], False)])
def test_integers_of_which_all_ranks_draw_the_first_are_told(ranks: list[list[int]], *, begins: bool) -> None:
    """All ranks draw with one seed, and from the range from which one process draws more."""
    alone: Any = Replay.__new__(Replay)
    alone._ranks, alone._drawn = [0, 1], {"3|train.py:4|1": [(rank, 0) for rank in range(len(ranks))]}
    alone.record = SimpleNamespace(value=lambda rank, _: torch.tensor(ranks[rank]))
    assert alone._begins_as_ranks(torch.tensor([[3, 1], [7, 0]]), "3|train.py:4|1") is begins


def test_the_run_whose_gradients_are_nearer_is_preferred(tmp_path: Path) -> None:
    ranks = trained(tmp_path / "ranks", [ONE]).record
    near, far = (trained(tmp_path / name, [ONE + apart]) for name, apart in (("near", 1e-3), ("far", 1.0)))
    assert is_nearer(ranks, near, far)
    assert not is_nearer(ranks, far, near)
    assert not is_nearer(ranks, trained(tmp_path / "none", []), far)
