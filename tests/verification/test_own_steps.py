"""Steps that a script takes without an optimizer of torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import Event, record, step, stepped, trained
from lazily import Lazily
from torch import Tensor, nn

import samestep
from samestep import Report
from samestep.instrument.collective_call import CollectiveCall
from samestep.verification.journal import value_path
from samestep.verification.judging import by_hand, storage
from samestep.verification.judging.record import Rank, Record
from samestep.verification.recording.by_hand import ByHand, HandWritten

# --- what is a step ---


class Told:
    """Notes what it is told of steps."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.told: list[tuple[str, list[float]]] = []

    def on_optimizer(self, optimizer: Any, where: str) -> None:
        self.made.append(where)

    def before_step(self, optimizer: HandWritten) -> None:
        self._note("before", optimizer)

    def after_step(self, optimizer: HandWritten) -> None:
        self._note("after", optimizer)

    def _note(self, kind: str, optimizer: HandWritten) -> None:
        self.told.append((kind, [round(one.item(), 4) for one in optimizer.param_groups[0]["params"]]))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def watched(told: Told) -> Iterator[ByHand]:
    watched = ByHand(told)
    yield watched
    watched.stop()


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def backward(watched: ByHand, loss: Tensor) -> None:
    watched.settle()
    watched.backward(loss)
    loss.backward()
    watched.arm()


def subtract(p: Tensor) -> None:
    with torch.no_grad():
        p -= 0.5


def through_a_view(p: Tensor) -> None:
    p.detach().view(1)[0] = 0.5


def out(p: Tensor) -> None:
    with torch.no_grad():
        torch.sub(p, 0.5, out=p)


def replaced(p: Tensor) -> None:
    p.data = torch.tensor(0.5)


WRITES: list[Callable[[Tensor], Any]] = [
    subtract,
    through_a_view,
    out,
    replaced,
    lambda p: p.data.sub_(0.5),
    lambda p: torch._foreach_sub_([p.data], 0.5),
    lambda p: nn.utils.vector_to_parameters(torch.tensor([0.5]), [p]),
]


@pytest.mark.parametrize("write", WRITES)
def test_a_step_goes_from_the_first_write_behind_a_backward_to_the_next_forward(
    told: Told, watched: ByHand, write: Callable[[Tensor], Any]
) -> None:
    model = Scale()
    backward(watched, model(torch.tensor(2.0)))
    assert model.weight.grad is not None
    model.weight.grad.div_(2)  # an average over ranks, say
    assert told.told == []
    write(model.weight)
    model.weight.data.mul_(0.5)
    assert told.told == [("before", [1.0])]
    model(torch.tensor(2.0))
    assert told.told == [("before", [1.0]), ("after", [0.25])]
    write(model.weight)  # behind no backward
    assert len(told.told) == 2


def test_a_step_begins_with_what_a_collective_brings_of_another_rank(told: Told, watched: ByHand) -> None:
    model = Scale()
    backward(watched, model(torch.tensor(2.0)))
    parts = [torch.zeros(()), torch.zeros(())]

    def all_gather(tensor_list: list[Tensor], tensor: Tensor) -> None: ...
    def broadcast(tensor: Tensor, src: int) -> None: ...

    watched.wrote(CollectiveCall(all_gather, "all_gather", (parts, model.weight.data), {}).filled)
    assert told.told == []  # it is sent, not filled
    watched.wrote(CollectiveCall(broadcast, "broadcast", (model.weight.data, 1), {}).filled)
    model.weight.data.fill_(0.5)  # has come from rank 1
    subtract(model.weight)
    model(torch.tensor(2.0))
    assert told.told == [("before", [1.0]), ("after", [0.0])]


def test_gradients_that_are_accumulated_are_those_of_one_step(told: Told, watched: ByHand) -> None:
    model = Scale()
    for _ in range(3):
        backward(watched, model(torch.tensor(2.0)))
    subtract(model.weight)
    backward(watched, model(torch.tensor(2.0)))
    assert [kind for kind, _ in told.told] == ["before", "after"]


def test_an_optimizer_of_torch_takes_over(told: Told, watched: ByHand) -> None:
    model = Scale()
    backward(watched, model(torch.tensor(2.0)))
    watched.stop()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert told.made == []


def test_where_there_is_no_model_a_step_ends_with_the_next_use(told: Told, watched: ByHand) -> None:
    weight = torch.tensor(1.0, requires_grad=True)
    watched._has_models = False
    watched._find = watched._know  # type: ignore[method-assign]  # other tests have left models
    backward(watched, weight * 2)
    weight.data.sub_(0.5)
    assert weight.numel() == 1
    assert [kind for kind, _ in told.told] == ["before"]
    _ = weight * 2
    assert told.told == [("before", [1.0]), ("after", [0.5])]


def test_what_the_object_that_steps_holds_is_its_state(told: Told, watched: ByHand) -> None:
    model = Scale()

    class Momentum:
        def __init__(self) -> None:
            self.params = list(model.parameters())
            self.velocity = {"weight": torch.zeros(())}

        def step(self) -> None:
            for one in self.params:
                one.data.sub_(self.velocity["weight"].add_(one.grad))

    optimizer = Momentum()
    backward(watched, model(torch.tensor(2.0)))
    optimizer.step()
    assert [one is optimizer.velocity["weight"] for one in watched.state()] == [True]


# --- gradients ---

ONE, OTHER = torch.tensor([1.0, 2.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 3.0, -1.0])
MEAN = (ONE + OTHER) / 2


def ranks(folder: Path, *gradients: Tensor) -> Record:
    """Ranks that have these gradients before their own code steps."""
    told = []
    for number, gradient in enumerate(gradients):
        path = value_path(folder, number, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"w": gradient}, path)
        told.append(Rank(number, [step(0, str(gradient.tolist()), kept=0, by_hand=True), stepped(0)]))
    return Record(folder, told)


@pytest.mark.parametrize(
    ("gradients", "updates", "is_compared", "says"),
    [
        ((MEAN, MEAN), "not checked", True, ""),
        ((ONE, OTHER), "not checked", True, ""),
        ((2 * MEAN, 2 * MEAN), "agrees", True, ""),
        ((2 * MEAN, 2 * MEAN), "differs", True, ""),
        ((2 * MEAN, 2 * MEAN), "not checked", False, "not checked: one process's gradients are 0.5 times"),
        ((1.5 * ONE, 0.75 * OTHER), "agrees", False, "agrees"),
        ((1.5 * ONE, 0.75 * OTHER), "not checked", False, "not checked: each rank's own code"),
        ((ONE, ONE), "agrees", True, ""),
    ],
    ids=["averaged", "own", "sum", "wrong sum", "open sum", "weighed", "open", "wrong"],
)
def test_what_lies_there_before_a_step_is_judged_with_its_update(
    tmp_path: Path, gradients: Sequence[Tensor], updates: str, says: str, *, is_compared: bool
) -> None:
    ours, whole = ranks(tmp_path / "ranks", *gradients), trained(tmp_path / "alone", [MEAN])
    report = Report(ranks=2, coverage={"updates": updates})
    used = by_hand.as_used(ours, whole, ours.ranks[0].steps, report)
    assert report.coverage.get("gradients", "").startswith(says)
    assert (used is not None) == is_compared
    if used is not None:
        factor = 1.0 if updates == "differs" or all(one is ONE for one in gradients) else None
        expected = gradients[0] * factor if factor else MEAN
        assert torch.equal(used.gradients(ours.ranks[0].steps[0])["w"], expected)


def test_a_step_is_of_the_parameters_that_it_changes() -> None:
    """The other model of a GAN has gradients, too."""
    both, moved, still = {"g": "1", "d": "2"}, {"g": "new", "d": "d"}, {"g": "g", "d": "d"}
    event = step(0, "", by_hand=True, gradients=both, parameters=still)
    rank = Rank(0, [event, {**stepped(0), "parameters": moved}])
    assert rank.steps[0]["gradients"] == {"g": "1"}
    frozen = Rank(0, [event, {**stepped(0), "parameters": still}])
    assert frozen.steps[0]["gradients"] == both


def test_a_step_that_one_rank_alone_has_looked_at_is_not_compared() -> None:
    def events(*kept: int | None) -> list[Event]:
        return [step(number, "g", kept=one) for number, one in enumerate(kept)]

    ours = record(events(0, 1), events(0, None))
    assert [ours.is_seen_by_all(one) for one in ours.ranks[0].steps] == [True, False]
    replicas = record(events(0, 1), events(None, None))
    assert all(replicas.is_seen_by_all(one) for one in replicas.ranks[0].steps)
    seen: Event = {"kind": "input", "window": 1, "rows": ["a"]}
    assert not record([*events(0, 1), seen], events(None, None)).is_seen_by_all(step(1, "g"))


# --- saved states ---


@pytest.mark.parametrize(
    ("saved", "is_found"),
    [
        ([(6, {"m": 2}), None], True),
        ([(6, {"m": 2}), (6, {"m": 2})], False),
        ([(8, {"m": 2}), None], False),
        ([(6, {}), None], False),
    ],
    ids=["one part", "each its own", "with what others have sent", "copies"],
)
def test_a_part_of_the_state_in_a_file_is_found(saved: Sequence[Any], *, is_found: bool) -> None:
    def save(numbers: int, state: dict[str, int]) -> Event:
        return {"kind": "save", "where": "train.py:40", "window": 4, "numbers": numbers, "own_state": state}

    ours = record(*([save(*one)] if one else [] for one in saved))
    report = Report(ranks=2)
    storage.judge_saved(ours, Record(Path(), [Rank(0, [save(8, {"m": 4})])]), report)
    assert [(one.code, one.tensor, one.where) for one in report.errors] == (
        [("checkpoint-inexact", "m", "train.py:40")] if is_found else []
    )


@pytest.mark.parametrize(("second", "is_found"), [(6, False), (4, True)])
def test_what_one_line_saves_of_a_step_counts_together(second: int, *, is_found: bool) -> None:
    """torch.distributed.checkpoint saves one tensor after the other, in an order of its own on every rank."""

    def saves(*of_tensors: tuple[int, str]) -> list[Event]:
        about = {"kind": "save", "where": "train.py:40", "window": 4}
        return [{**about, "numbers": size, "own_state": {name: size}} for size, name in of_tensors]

    ours = record(saves((2, "m"), (6, "n")), saves((second, "n"), (2, "m")))
    report = Report(ranks=2)
    storage.judge_saved(ours, Record(Path(), [Rank(0, saves((12, "n"), (4, "m")))]), report)
    assert [one.code for one in report.errors] == (["checkpoint-inexact"] if is_found else [])


@pytest.mark.parametrize(
    ("ranks", "alone", "is_placed", "found_at"),
    [
        ({5, 10}, {5, 10}, True, None),
        ({5}, {5, 10}, True, 9),
        ({5, 10}, {5}, True, 9),
        ({5, 10}, {5}, False, None),
        ({5, 15}, {5}, True, None),
    ],
    ids=["the same", "one process more", "the ranks more", "with other weights", "beyond its end"],
)
def test_saves_behind_other_steps_tell_of_a_metric_of_ones_own(
    ranks: set[int], alone: set[int], *, is_placed: bool, found_at: int | None
) -> None:
    def saves(windows: set[int], **more: Any) -> list[Event]:
        about = {"kind": "save", "where": "train.py:40", **more}
        return [{**about, "window": window} for window in sorted(windows)]

    mine = [one for number in range(16) for one in (step(number, "g"), stepped(number))]
    ours = record([*mine, *saves(ranks)], mine)
    evaluated = {"kind": "metrics", "window": 8, "placed": is_placed}
    theirs = [*saves(alone, placed=True), evaluated, {"kind": "batch", "window": 12}]
    report = Report(ranks=2)
    storage.judge_moments(ours, Record(Path(), [Rank(0, theirs)]), report)
    told = [(one.code, one.where, one.step) for one in report.errors]
    assert told == ([] if found_at is None else [("evaluation-inexact", "train.py:40", found_at)])
    report = Report(ranks=2, coverage={"evaluation": "agrees"})
    storage.judge_moments(ours, Record(Path(), [Rank(0, theirs)]), report)
    assert report.errors == []  # rounding may decide


@pytest.mark.parametrize(("drew", "is_found"), [(("x", "y"), False), (("x", "x"), True), ((None, None), True)])
def test_a_metric_of_samples_that_are_drawn_may_decide_on_a_save(
    drew: tuple[str | None, str | None], *, is_found: bool
) -> None:
    """It is that of all ranks, and one process draws other samples to estimate it."""

    def process(drew: str | None, *saves: int) -> list[Event]:
        brought = [{"kind": "collected", "phase": f"{window}.1", "drew": drew} for window in (5, 10)]
        return [*brought, *({"kind": "save", "where": "train.py:40", "window": window} for window in saves)]

    mine = [one for number in range(16) for one in (step(number, "g"), stepped(number))]
    ours = record([*mine, *process(drew[0], 5, 10)], [*mine, *process(drew[0])])
    alone = [*process(drew[1], 5), {"kind": "batch", "window": 12}]
    report = Report(ranks=2)
    storage.judge_moments(ours, Record(Path(), [Rank(0, alone)]), report)
    assert [one.step for one in report.errors] == ([9] if is_found else [])


# --- whole scripts ---

BEGIN = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(160, 6)
y = x.sum(1, keepdim=True).sin()
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
params = list(model.parameters())

def loss_of(step):
    part = slice(8 * step + rank, 8 * step + 8, size)
    return nn.functional.mse_loss(model(x[part]), y[part])
"""
LOOP = """
for step in range(8):
    loss_of(step).backward()
    for p in params:
        dist.all_reduce(p.grad)
        p.data -= 0.1 * p.grad DIVIDED
        p.grad = None
dist.destroy_process_group()
"""
SHARDED = """
class Sharded:
    def __init__(self):
        self.part = -(-sum(p.numel() for p in params) // size)
        self.momentum = torch.zeros(self.part)

    def step(self, gradients):
        flat = torch.cat([one.flatten() for one in gradients])
        flat = torch.cat([flat, flat.new_zeros(self.part * size - len(flat))])
        dist.all_reduce(flat)
        mine = flat[rank * self.part:(rank + 1) * self.part] / size
        norm = mine.square().sum()
        REDUCED
        self.momentum.mul_(0.9).add_(mine / norm.sqrt())
        whole = [torch.empty_like(mine) for _ in range(size)]
        dist.all_gather(whole, self.momentum)
        with torch.no_grad():
            for p, change in zip(params, torch.cat(whole)[:sum(p.numel() for p in params)].split(
                    [p.numel() for p in params])):
                p.sub_(change.view_as(p), alpha=0.01)

optimizer = Sharded()
for step in range(8):
    optimizer.step(torch.autograd.grad(loss_of(step), params))
dist.destroy_process_group()
"""
SCRIPTS = {
    "loop": BEGIN + LOOP.replace("DIVIDED", "/ size"),
    "not divided": BEGIN + LOOP.replace("DIVIDED", ""),
    "sharded": BEGIN + SHARDED.replace("REDUCED", "dist.all_reduce(norm)"),
    "norm of a shard": BEGIN + SHARDED.replace("REDUCED", ""),
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    folder = tmp_path_factory.mktemp("scripts")

    def make(name: str) -> Report:
        (folder / f"{name}.py").write_text(SCRIPTS[name], encoding="utf-8")
        return samestep.verify(folder / f"{name}.py")

    return Lazily(make)


@pytest.mark.parametrize("name", ["loop", "sharded"])
def test_a_right_step_by_hand_is_the_same(reports: Lazily[Report], name: str) -> None:
    reports[name].require_same()


@pytest.mark.parametrize(
    ("name", "factor"), [("not divided", 2.0), pytest.param("norm of a shard", None, marks=pytest.mark.prove)]
)
def test_a_wrong_step_by_hand_is_found(reports: Lazily[Report], name: str, factor: float | None) -> None:
    found = {one.code: one for one in reports[name].errors}
    assert "update-differs" in found
    assert factor is None or found["update-differs"].factor == pytest.approx(factor, rel=1e-3)
