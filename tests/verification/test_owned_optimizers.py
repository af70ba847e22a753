"""Optimizers that a rank holds for itself: of clients, of members of a population."""

from __future__ import annotations

import pytest
from journals import Event, ended, record, step
from lazily import Lazily

import samestep
from samestep import Report
from samestep.verification.judging import owned

SCRIPT = """
import copy, torch, torch.distributed as dist
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
shared = torch.nn.Linear(4, 1)
outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9)
mine = range(rank, CLIENTS, size)
clients = [copy.deepcopy(shared) for _ in mine]
inner = [torch.optim.Adam(client.parameters(), lr=0.01) for client in clients]
draws = [torch.Generator().manual_seed(SEED) for place, number in enumerate(mine)]
for _ in range(5):
    for client, optimizer, draw in zip(clients, inner, draws):
        client.load_state_dict(shared.state_dict())
        for _ in range(3):
            x = torch.randn(8, 4, generator=draw)
            optimizer.zero_grad()
            (client(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    for p, *theirs in zip(shared.parameters(), *(client.parameters() for client in clients)):
        p.grad = sum(p.detach() - one.detach() for one in theirs)
        dist.all_reduce(p.grad)
        p.grad /= DIVISOR
    outer.step()
dist.destroy_process_group()
"""
RIGHT = {"CLIENTS": "4", "SEED": "number", "DIVISOR": "4"}
CHANGED = {
    "three clients": {"CLIENTS": "3", "DIVISOR": "3"},
    "seeds of a rank": {"SEED": "place"},
    "mean of a rank": {"DIVISOR": "len(clients)"},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Lazily[Report]:
    folder = tmp_path_factory.mktemp("scripts")

    def make(changed: str) -> Report:
        text = SCRIPT
        for name, value in (RIGHT | CHANGED.get(changed, {})).items():
            text = text.replace(name, value)
        (folder / "train.py").write_text(text, encoding="utf-8")
        return samestep.verify(folder / "train.py")

    return Lazily(make)


def test_clients_that_are_dealt_out_over_the_ranks_are_those_of_one_process(reports: Lazily[Report]) -> None:
    assert reports["nothing"].verdict == "same", str(reports["nothing"])
    assert reports["nothing"].margins["gradients"].startswith("4 optimizers, each of one rank")


def test_ranks_may_hold_more_or_fewer_of_them(reports: Lazily[Report]) -> None:
    assert reports["three clients"].verdict == "same", str(reports["three clients"])


@pytest.mark.parametrize("changed", ["seeds of a rank", "mean of a rank"])
def test_clients_with_other_data_and_another_mean_of_their_moves_are_no_training_of_one(
    reports: Lazily[Report], changed: str
) -> None:
    assert reports[changed].verdict != "same", str(reports[changed])


def steps(*norms: tuple[int, float]) -> list[Event]:
    """Steps of a process: the number of an optimizer, and the norm of its gradient."""
    return [
        step(event, str(norm), optimizer=optimizer, norms={"w": norm}) for event, (optimizer, norm) in enumerate(norms)
    ]


ALL = steps((1, 3.0), (1, 2.0), (2, 5.0), (2, 4.0), (0, 7.0))
FIRST, SECOND = steps((1, 3.0), (1, 2.0), (0, 7.0)), steps((1, 5.0), (1, 4.0), (0, 7.0))


@pytest.mark.parametrize(
    ("first", "second", "alone", "number"),
    [
        (FIRST, SECOND, ALL, 2),
        (FIRST, SECOND, ALL[:2] + ALL[4:], 0),  # one process has no second client
        (FIRST, SECOND, ALL[:2] + ALL[:2] + ALL[4:], 0),
        (FIRST, FIRST, ALL, 0),  # both ranks train the first client
        (FIRST, SECOND[:2] + steps((0, 7.1)), ALL, 0),
        (FIRST, SECOND, ALL[:4] + steps((0, 7.1)), 0),
        (FIRST[:1], SECOND[:1], steps((1, 3.0), (2, 5.0)), 0),  # one step shows nothing of what it makes
    ],
)
def test_each_optimizer_of_a_rank_has_one_of_its_own_in_one_process(
    first: list[Event], second: list[Event], alone: list[Event], number: int
) -> None:
    assert owned.count(record(first, second), record(alone)) == number


@pytest.mark.parametrize(
    ("second", "number"), [((2.0, 5.0), 2), ((2.0, 5.5), 0), ((2.0,), 0)], ids=["in turn", "another", "one is left out"]
)
def test_ranks_may_take_the_steps_of_one_process_in_turn(second: tuple[float, ...], number: int) -> None:
    """A model that is sent from rank to rank."""
    whole = steps(*((1, norm) for norm in (3.0, 2.0, 5.0, 4.0)))
    ranks = [steps(*((1, norm) for norm in norms)) for norms in ((3.0, 4.0), second)]
    assert owned.count(record(*ranks), record(whole)) == number


def test_ranks_of_which_one_takes_all_steps_take_none_in_turn() -> None:
    """The one trains as one process does, the other by itself, and the recording was cut."""
    whole, cut = steps((1, 3.0), (1, 2.0), (1, 5.0)), {**ended(), "enough": True}
    assert owned.count(record([*steps((1, 3.0), (1, 2.0)), cut], [*steps((1, 8.0), (1, 9.0)), cut]), record(whole)) == 0


def test_each_takes_as_many_steps_as_in_one_process_unless_the_recording_was_cut() -> None:
    """Clients that take three steps in each round, and one process two: all that both have agree."""
    more = [FIRST[0], FIRST[1], *steps((1, 9.0)), FIRST[2]]
    assert owned.count(record(more, SECOND), record(ALL)) == 0
    assert owned.count(record([*more, {**ended(), "enough": True}], SECOND), record(ALL)) == 2


def test_parameters_are_compared_by_their_order() -> None:
    """torch.func.functional_call gives a module the parameters of one client after the other."""
    lent = [{**one, "norms": {"net.weight": one["norms"]["w"]}} for one in SECOND]
    assert owned.count(record(FIRST, lent), record(ALL)) == 2
    assert owned.count(record(FIRST, [{**one, "norms": {}} for one in SECOND]), record(ALL)) == 0


def test_ranks_that_step_alike_hold_none_for_themselves() -> None:
    assert not owned.are_held(record(FIRST, FIRST))
    assert owned.are_held(record(FIRST, SECOND))


def test_one_process_holds_more_than_each_rank() -> None:
    assert owned.holds_more(record(ALL), record(FIRST, SECOND))
    assert not owned.holds_more(record(FIRST), record(FIRST, SECOND))
