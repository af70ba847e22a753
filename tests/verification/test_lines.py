"""The line at which ranks first compute something else than one process does."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from lazily import Lazily
from torch import Tensor

import samestep
from samestep import Report
from samestep.verification.findings import Finding
from samestep.verification.journal import TraceWriter, read, value_path
from samestep.verification.judging import causes
from samestep.verification.judging.explanations import ADDED_UP, MEAN_OF_MEANS
from samestep.verification.judging.lines import Lines, _brought_apart, _lines, _relation
from samestep.verification.judging.record import Rank, Record, Run
from samestep.verification.recording.lines import FORWARD, LineTrace
from samestep.verification.runs import Ended

A, B = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])


def kept(value: Tensor, **more: Any) -> dict[str, Any]:
    return {"value": value, "shape": list(value.shape), "cut": False, "grad": True} | more


def large(*shape: int) -> dict[str, Any]:
    return {"value": None, "shape": [*shape], "cut": False, "grad": True}


@pytest.mark.parametrize(
    ("ranks", "whole", "relation"),
    [
        ((A, A), A, "copies"),
        ((A, B), (A + B) / 2, "mean"),
        ((A, B), A + B, "sum"),
        ((A, B), (A.square() + B.square()).sqrt(), "norm"),
        ((A, B), torch.cat([A, B]), "parts"),
        ((A, B), torch.cat([A, B], dim=1), "parts"),
        ((A, B), torch.stack([A[0], B[0], A[1], B[1]]), "parts"),  # data[rank::2]
        ((A, B), torch.tensor([1.0, 5.0, 2.0, 6.0, 3.0, 7.0, 4.0, 8.0]), "parts"),  # cut, and flattened after that
        ((A, B), A, None),
        ((A[0], B[0]), torch.ones(3), None),
    ],
)
def test_what_ranks_compute_belongs_to_what_one_process_computes(
    ranks: tuple[Tensor, Tensor], whole: Tensor, relation: str | None
) -> None:
    assert _relation(kept(whole), [kept(one) for one in ranks]) == relation
    cut = [kept(one, cut=True) for one in ranks]
    assert _relation(kept(whole), cut) == (relation or "unknown")  # a part of it may be anywhere


def test_counts_of_the_shape_of_one_process_are_no_padded_texts() -> None:
    """Degrees that each rank counts among its own edges, at least 1, are those of one process but for ones."""
    whole, first, other = torch.tensor([2, 3, 1, 4]), torch.tensor([2, 3, 1, 1]), torch.tensor([1, 1, 1, 4])
    assert _relation(kept(whole), [kept(first), kept(other)]) is None
    assert _relation(kept(whole), [kept(first[:3]), kept(other[3:])]) == "parts"
    assert _relation(kept(whole), [kept(first), kept(torch.tensor([4, 1]))]) == "padded"


def test_what_is_too_large_to_be_kept_differs_where_its_shape_shows_it() -> None:
    assert _relation(large(18, 9), [large(9, 9)] * 2) == "unknown"
    assert _relation(large(18, 18), [large(9, 9)] * 2) is None


def test_only_results_of_the_segments_that_are_looked_at_are_kept(tmp_path: Path) -> None:
    journal = TraceWriter(tmp_path, 0)
    lines = LineTrace(journal)
    torch.ones(2).exp()
    lines.begin("forward")
    (torch.ones(2) * 3).sum()
    lines.begin("step")
    torch.ones(2).neg()
    lines.end()
    torch.ones(2).exp()
    (event,) = read(tmp_path, 0)
    told = torch.load(value_path(tmp_path, 0, event["kept"]), weights_only=False)
    assert [(one["place"][0], one["place"][2]) for one in told] == [
        ("forward", "ones"),
        ("forward", "mul"),
        ("forward", "sum"),
        ("step", "ones"),
        ("step", "neg"),
    ]
    assert {Path(one["place"][1].rpartition(":")[0]).name for one in told} == {"test_lines.py"}


TRAIN = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
    loader = DataLoader(data, 8 // world, sampler=DistributedSampler(data, shuffle=False))
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in loader:
        out = model(x)
        {loss}
        penalty = 0.1 * out.abs().mean()
        total = loss + penalty
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    dist.destroy_process_group()
"""
LOSSES = {
    "a sum": "loss = (out - y).square().sum() / 24",
    "without gradients": """parts = [torch.zeros_like(out) for _ in range(world)]
        dist.all_gather(parts, out)
        parts[rank] = out
        loss = torch.logsumexp(torch.cat(parts) @ y.t(), 0).mean()""",
}
LOSSES["detached"] = LOSSES["without gradients"].replace("(parts, out)", "(parts, out.detach())")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    folder = tmp_path_factory.mktemp("scripts")

    def make(name: str) -> Report:
        path = folder / f"{name.replace(' ', '-')}.py"
        path.write_text(textwrap.dedent(TRAIN).replace("{loss}", LOSSES[name].replace("        ", "    ")))
        return samestep.verify(path)

    return Lazily(make)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        pytest.param("a sum", "loss = (out - y)", marks=pytest.mark.prove),
        ("without gradients", "dist.all_gather(parts, out)"),
        ("detached", "dist.all_gather(parts, out.detach())"),
    ],
)
def test_the_line_that_makes_gradients_differ_is_named(reports: Lazily[Report], name: str, line: str) -> None:
    (error,) = reports[name].errors
    assert error.where is not None
    script = textwrap.dedent(TRAIN).replace("{loss}", LOSSES[name].replace("        ", "    ")).splitlines()
    assert line in script[int(error.where.rpartition(":")[2]) - 1]
    assert "(shows at" in error.cause


def brought(*values: float, alone: float) -> tuple[dict[Any, Any], list[dict[Any, Any]]]:
    place = ("forward", "train.py:9", "all_reduce", 1)
    one, *ranks = ({place: kept(torch.tensor([value]), grad=False)} for value in (alone, *values))
    return one, ranks


@pytest.mark.parametrize(
    ("ranks", "alone", "is_found"),
    [
        ((16.0, 16.0), 16.0, False),  # tokens of all
        ((3.0, 3.0), 1.5, False),  # a sum of means, to be divided by their number
        ((26.0, 26.0), 16.0, True),  # summed up again and again
    ],
)
def test_a_sum_on_the_way_to_the_loss_that_is_not_one_process_s_is_named(
    ranks: tuple[float, ...], alone: float, *, is_found: bool
) -> None:
    found = _brought_apart(list(_lines(*brought(*ranks, alone=alone), ["forward"])))
    assert (None if found is None else found.where) == ("train.py:9" if is_found else None)


def traced(
    folder: Path, *lines: tuple[str, str, Tensor, dict[str, Any]], segment: str = "forward"
) -> list[dict[str, Any]]:
    """What one process has kept of these lines: where, which function, and what it has brought."""
    path = value_path(folder, 0, 1)
    path.parent.mkdir(parents=True)
    told = [
        {"place": (segment, where, name, 1), "at": None, **kept(value), **more} for where, name, value, more in lines
    ]
    torch.save(told, path)
    return [{"kind": "lines", "kept": 1}]


def located(folder: Path, mine: list[Any], alone: list[Any], cause: str = "") -> Finding:
    """Where an error of gradients is put, if both of two ranks have brought `mine` and one process `alone`."""
    ranks = Record(folder / "ranks", [])
    for number in range(2):
        events = traced(folder / f"rank {number}", *mine[number])
        target = value_path(folder / "ranks", number, 1)
        target.parent.mkdir(parents=True)
        value_path(folder / f"rank {number}", 0, 1).rename(target)
        ranks.ranks.append(Rank(number, events))
    events = traced(folder / "alone", *alone)
    run = Run(
        Ended(code=0, hung=False, failure=None, folder=folder / "alone"), Record(folder / "alone", [Rank(0, events)])
    )
    finding = Finding(code="gradient-differs", where="train.py:25", cause=cause)
    return Lines(ranks, run).located(finding)


@pytest.mark.parametrize(
    ("made_anew", "where"), [(False, "train.py:8"), (True, "train.py:9")], ids=["a running sum", "a sum of its own"]
)
def test_a_sum_over_the_ranks_in_the_tensor_that_a_line_adds_to_is_named(
    tmp_path: Path, *, made_anew: bool, where: str
) -> None:
    """What an all_reduce has written into a running count is added up again with the next one."""
    sums = ("train.py:8", "all_reduce", torch.tensor([4.0, 2.0, 6.0]), {"at": 7, "new": False, "grad": False})
    clears = ("train.py:7", "zeros", torch.tensor([0.0, 0.0, 0.0]), {"at": 7, "new": True, "grad": False})
    adds = {"at": 7, "new": False}
    agrees = ("train.py:5", "mul", A, {"at": 5, "new": True})
    before = [agrees, sums, clears] if made_anew else [agrees, sums]
    mine = [
        [*before, ("train.py:9", "__iadd__", torch.tensor(one), adds)] for one in ([5.0, 2.5, 9.0], [7.0, 3.0, 8.0])
    ]
    alone = [*before, ("train.py:9", "__iadd__", torch.tensor([6.0, 4.0, 1.0]), adds)]
    assert located(tmp_path, mine, alone).where == where


@pytest.mark.parametrize(("gathered", "where"), [(True, "train.py:59"), (False, "train.py:64")])
def test_rows_in_another_order_are_named_where_they_are_brought_together(
    tmp_path: Path, *, gathered: bool, where: str
) -> None:
    """One process comes by no all_gather; the first line that both come by is behind it."""
    records = []
    for name, values in (("ranks", torch.tensor([1.0, 4.0, 2.0])), ("alone", torch.tensor([1.0, 2.0, 3.0]))):
        lines = [
            ("train.py:57", "relu", A, {}),
            ("train.py:59", "all_gather", B, {}),
            ("train.py:64", "sub", values, {}),
        ]
        events = traced(tmp_path / name, *(lines if name == "ranks" else lines[::2]), segment="evaluation")
        more = [{"kind": "collected", "where": "train.py:59", "rows": []}] if gathered else []
        records.append(Record(tmp_path / name, [Rank(0, [*more, *events])]))
    run = Run(Ended(code=0, hung=False, failure=None, folder=tmp_path), records[1])
    finding = Finding(code="evaluation-inexact", where="train.py:59", cause="other rows")
    assert Lines(records[0], run).located(finding).where == where


def test_a_term_that_every_rank_has_whole_is_named_where_gradients_are_added_up(tmp_path: Path) -> None:
    def loss(part: float) -> list[Any]:
        lines = [("train.py:20", part), ("train.py:21", 3.0), ("train.py:22", part + 3.0)]
        return [(where, "mul", torch.tensor(value), {}) for where, value in lines]

    found = located(tmp_path, [loss(1.0), loss(2.0)], loss(3.0), f"at step 0 {ADDED_UP}")
    assert found.where == "train.py:21"
    assert "counts once for each" in found.cause


def test_what_is_made_of_the_samples_is_named_before_what_a_model_makes_of_it(tmp_path: Path) -> None:
    """Times that are spread over a rank's own rows, say: no gradient goes through them."""
    plain = {"grad": False}
    shared = ("train.py:5", "rand", torch.tensor([0.5]), plain)

    def lines(times: Tensor, output: float) -> list[Any]:
        made, agrees = ("train.py:6", "div", times, plain), ("train.py:8", "mul", A, {})
        return [shared, made, agrees, ("train.py:9", "linear", torch.tensor([output]), {})]

    mine = [lines(torch.tensor([0.0, 0.5]), 1.0), lines(torch.tensor([0.0, 0.5]), 2.0)]
    assert located(tmp_path, mine, lines(torch.tensor([0.0, 0.25, 0.5, 0.75]), 3.5)).where == "train.py:6"


def test_a_line_behind_another_is_named_after_it() -> None:
    finding = Finding(code="gradient-differs", where="train.py:30", cause="They differ", fix=None)
    first = causes.located(finding, "train.py:9", "the first result that differs is that of this line")
    assert causes.located(first, "train.py:5", "it is made at this line").cause == (
        "They differ; the first result that differs is that of train.py:9 (shows at train.py:30); it is made at this "
        "line"
    )


@pytest.mark.parametrize(
    ("alone", "ranks", "relation"),
    [
        ([[1.0, 2.0], [3.0, 4.0]], [[[1.0], [2.0]], [[3.0], [4.0]]], "parts"),
        ([3.0, 7.0], [[1.0, 2.0], [3.0, 4.0]], "sum"),
        ([3.0, 7.0], [[2.0, 4.0], [6.0, 8.0]], "mean"),
        ([[1.0, 2.0], [3.0, 4.0]], [[[1.0], [2.0]], [[3.0], [5.0]]], None),
        ([[1, 2, 0, 0], [3, 4, 5, 6]], [[[1, 2], [3, 4]], [[5, 6], [0, 0]]], "parts"),
        ([[1, 2, 0, 0], [3, 4, 5, 6]], [[[1, 2], [3, 4]], [[5, 6], [0]]], "padded"),
        ([[1, 2, 0, 0], [3, 4, 5, 6]], [[[1, 2], [3, 4]], [[5, 5], [0]]], None),
    ],
)
def test_micro_batches_of_ranks_are_held_together_against_one_process_s(
    alone: list[Any], ranks: list[list[Any]], relation: str | None
) -> None:
    """The first of a rank may have rows of another than the first of one process."""

    def trace(values: list[Any]) -> dict[Any, dict[str, Any]]:
        entries = [{**kept(torch.tensor(value)), "grad": True, "new": True} for value in values]
        return {(FORWARD, "train.py:9", "mul", number): entry for number, entry in enumerate(entries)}

    found = list(_lines(trace(alone), [trace(one) for one in ranks], [FORWARD]))
    assert [one.relation for one in found] == [relation] * len(alone)


def test_a_mean_of_means_is_named_at_the_loss_though_it_may_be_near_one_process_s(tmp_path: Path) -> None:
    cause = f"at step 0 the gradient is {MEAN_OF_MEANS}"
    loss = [("train.py:7", "div", torch.tensor(1.0), {})]
    assert located(tmp_path, [loss, loss], loss, cause).where == "train.py:7"


@pytest.mark.parametrize(("is_used", "where"), [(True, "train.py:4"), (False, "train.py:9")])
def test_what_is_made_before_the_first_step_of_a_rank_s_part_is_named(
    tmp_path: Path, *, is_used: bool, where: str
) -> None:
    """Degrees are sums over the ranks' edges; their inverses are no longer one process's."""

    def lines(degrees: Tensor, result: Tensor) -> list[Any]:
        setup = {"grad": False, "new": True, "place": ("setup", "train.py:3", "sum", 1)}
        return [
            ("", "", degrees, {**setup, "at": 1, "of": []}),
            ("", "", 1 / degrees, {**setup, "at": 2, "of": [1], "place": ("setup", "train.py:4", "div", 1)}),
            ("train.py:5", "mul", torch.ones(2), {"at": 3, "of": [], "new": True}),
            ("train.py:9", "mul", result, {"at": 4, "of": [3, 2] if is_used else [3], "new": True}),
        ]

    one, other, whole = torch.tensor([1.0, 4.0]), torch.tensor([8.0, 5.0]), torch.tensor([9.0, 9.0])
    ranks = [lines(each, 1 / each) for each in (one, other)]
    assert located(tmp_path, ranks, lines(whole, 1 / whole)).where == where


@pytest.mark.parametrize(("of", "is_named"), [([1], True), ([], False)], ids=["of tokens that agree", "of nothing"])
def test_integers_that_are_made_of_what_agrees_are_named(tmp_path: Path, of: list[int], *, is_named: bool) -> None:
    """Labels that each rank shifts in its own part of a sequence are; places in a rank's batch, arange(n), are not."""

    def lines(part: Tensor, whole: Tensor, loss: float) -> list[Any]:
        integers = {"grad": False, "new": True}
        return [
            ("train.py:3", "stack", whole, {**integers, "at": 1, "of": []}),
            ("train.py:5", "getitem", part, {**integers, "at": 2, "of": of}),
            ("train.py:7", "mul", torch.ones(2), {"at": 3, "of": [], "new": True}),
            ("train.py:9", "sum", torch.tensor(loss), {"at": 4, "of": [3], "new": True}),
        ]

    tokens = torch.arange(6)
    ranks = [lines(part[1:], tokens, loss) for part, loss in zip(tokens.chunk(2), (1.0, 5.0), strict=True)]
    found = located(tmp_path, ranks, lines(tokens[1:], tokens, 7.0))
    assert found.where == ("train.py:5" if is_named else "train.py:9")


def shifted(row: Tensor) -> Tensor:
    return row.roll(1)


def test_a_line_is_kept_with_the_line_that_calls_its_function(tmp_path: Path) -> None:
    lines = LineTrace(TraceWriter(tmp_path, 0))
    lines.begin("forward")
    shifted(A)
    A.square()
    lines.end()
    (event,) = read(tmp_path, 0)
    roll, square = torch.load(value_path(tmp_path, 0, event["kept"]), weights_only=False)
    where, first, last = roll["called"]
    assert where.rpartition(":")[0] == square["place"][1].rpartition(":")[0]
    assert first < int(where.rpartition(":")[2]) == int(square["place"][1].rpartition(":")[2]) - 1 < last
    assert square["called"] is None  # pytest calls this test


@pytest.mark.parametrize(("last", "is_told"), [(30, True), (24, False)], ids=["by the training", "by a function"])
def test_the_line_that_calls_is_told_too(tmp_path: Path, last: int, *, is_told: bool) -> None:
    def lines(value: Tensor) -> list[Any]:
        labels = ("train.py:5", "roll", value, {"called": ("train.py:22", 20, last)})
        return [("train.py:3", "mul", torch.ones(2), {}), labels]

    found = located(tmp_path, [lines(A[0]), lines(B[0])], lines(9 * A[0]))
    assert found.where == "train.py:5"
    assert (", which is called at train.py:22 (shows at train.py:25)" in found.cause) is is_told


@pytest.mark.parametrize("is_used", [True, False])
def test_positions_of_a_rank_s_part_are_named_where_a_line_computes_of_them(tmp_path: Path, *, is_used: bool) -> None:
    def lines(positions: list[int]) -> list[Any]:
        angles = torch.tensor(positions).double() * 0.1
        return [
            ("train.py:3", "mul", torch.ones(2), {"at": 1, "of": []}),
            ("train.py:5", "arange", torch.tensor(positions), {"grad": False, "at": 2, "of": []}),
            (
                "train.py:7",
                "to",
                torch.tensor(positions).double(),
                {"grad": False, "at": 3, "of": [2] if is_used else []},
            ),
            ("train.py:7", "mul", angles, {"at": 4, "of": [3]}),
        ]

    found = located(tmp_path, [lines([0, 1]), lines([0, 1])], lines([0, 1, 2, 3]))
    assert found.where == ("train.py:5" if is_used else "train.py:7")


@pytest.mark.parametrize(("at", "of", "where"), [(7, [], "train.py:9"), (7, [7], "train.py:2"), (3, [], "train.py:2")])
def test_a_total_from_before_that_no_line_uses_is_not_to_blame(
    tmp_path: Path, at: int, of: list[int], where: str
) -> None:
    """The sum of an epoch's losses is added up over the ranks between two steps, of which it is no part."""

    def lines(total: float, value: Tensor) -> list[Any]:
        return [
            ("train.py:1", "mul", torch.ones(2), {"at": 3, "of": [], "new": True}),
            ("train.py:2", "all_reduce", torch.tensor(total), {"grad": False, "at": at, "new": False}),
            ("train.py:9", "mul", value, {"at": 4, "of": of, "new": True}),
        ]

    found = located(tmp_path, [lines(5.0, A[0]), lines(5.0, B[0])], lines(9.0, 9 * A[0]))
    assert found.where == where


def test_comparisons_that_choose_a_rank_s_part_are_not_blamed_for_other_samples(tmp_path: Path) -> None:
    def lines(mask: list[bool], degrees: list[float]) -> list[Any]:
        return [
            ("train.py:3", "mul", torch.ones(2), {"grad": False, "at": 1, "of": []}),
            ("train.py:5", "ge", torch.tensor(mask), {"grad": False, "at": 2, "of": [1]}),
            ("train.py:7", "clamp", torch.tensor(degrees), {"grad": False}),
            ("train.py:9", "sum", torch.tensor(sum(degrees)), {}),
        ]

    ranks = [lines([True, True], [2.0, 1.0]), lines([False, True], [1.0, 7.0])]
    assert located(tmp_path, ranks, lines([True, True], [9.0, 5.0])).where == "train.py:7"
