"""Models that a script cuts over the ranks by itself, held against one process, from the values of the first steps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from journals import Event, step, stepped
from torch import Tensor

from samestep.verification.journal import value_path
from samestep.verification.judging.parts import Parts
from samestep.verification.judging.placement import make_the_whole, places
from samestep.verification.judging.record import Rank, Record

WHOLE = {
    "in.weight": torch.randn(4, 3, generator=torch.Generator().manual_seed(1)),
    "up.weight": torch.randn(4, 4, generator=torch.Generator().manual_seed(2)),
    "up.bias": torch.zeros(4),
    "norm.weight": torch.ones(4),
    "out.weight": torch.randn(2, 4, generator=torch.Generator().manual_seed(3)),
}
GRADIENTS = {name: torch.randn(one.shape, generator=torch.Generator().manual_seed(4)) for name, one in WHOLE.items()}
CUT = {"up.weight", "up.bias"}  # over their rows


def halves(values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{name: one.chunk(2)[rank] if name in CUT else one for name, one in values.items()} for rank in range(2)]


def recorded(
    folder: Path,
    held: list[dict[str, Tensor]],
    gradients: list[dict[str, Tensor]],
    inputs: list[Tensor],
    rate: float = 0.1,
    later: list[dict[str, Tensor]] | None = None,
    begun: list[dict[str, Tensor]] | None = None,
) -> Record:
    """Processes that hold these parameters, and take one step with these gradients, and another with the later ones.

    The other begins with the parameters `begun`, where these are known.
    """
    ranks = []
    for number, (own, brought, given) in enumerate(zip(held, gradients, inputs, strict=True)):
        kept: list[Any] = [{"parameters": {0: own}}, given, brought, *(later or [])[number : number + 1]]
        kept += [{"parameters": {0: begun[number]}}] if begun else []
        for place, value in enumerate(kept):
            value_path(folder, number, place).parent.mkdir(parents=True, exist_ok=True)
            torch.save(value, value_path(folder, number, place))
        events: list[Event] = [
            {"kind": "window", "number": 0, "kept": 0},
            {"kind": "given", "window": 0, "kept": 1},
            step(0, "g", kept=2, rates=[rate]),
            stepped(0),
        ]
        if later:
            events += [
                {"kind": "window", "number": 1, "kept": 4 if begun else None},
                step(1, "g", kept=3, rates=[rate]),
                stepped(1),
            ]
        ranks.append(Rank(number, events))
    return Record(folder, ranks)


def parts(
    folder: Path,
    gradients: list[dict[str, Tensor]],
    held: list[dict[str, Tensor]] | None = None,
    inputs: list[Tensor] | None = None,
    rate: float = 0.1,
) -> Parts:
    samples = torch.arange(8.0)
    ranks = recorded(folder / "ranks", held or halves(WHOLE), gradients, inputs or [samples, samples], rate)
    return Parts(ranks, recorded(folder / "alone", [WHOLE], [GRADIENTS], [samples]))


def test_parts_are_found_by_their_values_and_zeros_like_their_neighbours() -> None:
    found = [places(held, WHOLE) for held in halves(WHOLE)]
    assert [found[1][name].name for name in WHOLE] == [*WHOLE]
    assert found[1]["up.weight"].of(WHOLE["up.weight"]).equal(WHOLE["up.weight"][2:])
    assert found[1]["up.bias"].of(torch.arange(4)).tolist() == [2, 3]
    assert make_the_whole(found, WHOLE)
    assert not make_the_whole(found[:1], WHOLE)


def test_a_stage_that_counts_its_blocks_anew_is_found() -> None:
    """Its norm begins with ones, as that of the other block does."""
    blocks = {f"{number}.{name}": WHOLE[name] + number * (name != "norm.weight") for number in (0, 1) for name in WHOLE}
    stage = {name.replace("1.", "0.", 1): one for name, one in blocks.items() if name.startswith("1.")}
    assert {name: place.name for name, place in places(stage, blocks).items()} == {
        name: name.replace("0.", "1.", 1) for name in stage
    }


def test_a_part_of_a_sequential_is_found_by_what_its_numbers_are_smaller_by() -> None:
    """Layers 2 and 3 of four; all norms begin with ones."""
    layers = {f"{number}.weight": torch.ones(2) if number % 2 else torch.arange(2.0) + number for number in range(4)}
    stage = {"0.weight": layers["2.weight"], "1.weight": layers["3.weight"]}
    found = {name: (place.name, place.candidates) for name, place in places(stage, layers).items()}
    assert found == {"0.weight": ("2.weight", ()), "1.weight": ("3.weight", ())}


def test_copies_of_one_expert_are_told_by_their_gradients(tmp_path: Path) -> None:
    """Nothing else does; and where these do not, either, a gradient that differs is no finding."""
    begun = torch.arange(1.0, 4.0)
    whole = {"gate": torch.tensor([5.0, 6.0]), **{f"experts.{number}": begun for number in range(4)}}
    held = [{"gate": whole["gate"], **{f"experts.{number}": begun for number in range(2)}} for _ in range(2)]
    gradients = {name: torch.full_like(one, float(place)) for place, (name, one) in enumerate(whole.items(), 1)}
    own = [
        {"gate": gradients["gate"]} | {f"experts.{i}": gradients[f"experts.{2 * rank + i}"] for i in (0, 1)}
        for rank in (0, 1)
    ]
    alone = recorded(tmp_path / "alone", [whole], [gradients], [torch.arange(8.0)])
    ranks = recorded(tmp_path / "ranks", held, own, [torch.arange(8.0)] * 2)
    found = Parts(ranks, alone)
    assert [found.places[1][name].name for name in ("experts.0", "experts.1")] == ["experts.2", "experts.3"]
    assert found.agree()
    own[1]["experts.0"] = own[1]["experts.0"] * 1.5
    unknown = Parts(recorded(tmp_path / "other", held, own, [torch.arange(8.0)] * 2), alone)
    assert not unknown.agree()
    assert [*unknown.findings(inputs_are_known=False)] == []


def test_every_second_row_and_three_parts_in_one_are_found() -> None:
    whole = {"qkv": torch.arange(12.0).view(6, 2)}
    assert places({"qkv": whole["qkv"][1::2]}, whole)["qkv"].of(torch.arange(6)).tolist() == [1, 3, 5]
    fused = whole["qkv"].view(3, 2, 2)[:, 1]
    assert places({"qkv": fused}, whole)["qkv"].of(torch.arange(6)).tolist() == [1, 3, 5]
    assert places({"qkv": fused + 0.5}, whole) == {}


def test_the_last_part_of_a_vector_may_be_padded() -> None:
    whole = {"flat": torch.tensor([1.0, 0.0, 0.0, 2.0, 3.0])}
    last = {"flat": torch.tensor([2.0, 3.0, 0.0])}
    found = [places({"flat": whole["flat"][:3]}, whole), places(last, whole)]
    assert make_the_whole(found, whole)
    assert found[1]["flat"].held(last["flat"]).tolist() == [2.0, 3.0]
    assert places({"flat": torch.tensor([2.0, 3.0, 9.0])}, whole) == {}


def test_gradients_of_all_parts_agree(tmp_path: Path) -> None:
    whole = parts(tmp_path, halves(GRADIENTS))
    assert whole.agree()
    assert [*whole.findings(inputs_are_known=True), *whole.equal_parts()] == []


@pytest.mark.parametrize(
    ("rates", "found"),
    [({"out.weight": 0.01}, []), ({"out.weight": 0.1}, ["out.weight"]), (dict.fromkeys(WHOLE, 0.2), [])],
    ids=["by layer", "of another layer", "scaled"],
)
def test_rates_are_compared_by_the_place_of_a_parameter(
    tmp_path: Path, rates: dict[str, float], found: list[str]
) -> None:
    """A layer may have a rate of its own, by its depth in the whole model."""
    known = parts(tmp_path, halves(GRADIENTS))

    def with_rates(record: Record, rates: dict[str, float]) -> Record:
        own = [rates.get(one, 0.1) for one in WHOLE]
        names = {"kind": "names", "optimizer": 0, "names": [*WHOLE], "groups": [*range(len(own))]}
        taken = [
            [{**one, "rates": own} if one["kind"] == "step" else one for one in rank.events] for rank in record.ranks
        ]
        return Record(record.folder, [Rank(number, [names, *events]) for number, events in enumerate(taken)])

    of_parts = Parts(with_rates(known.record, rates), with_rates(known.alone, {"out.weight": 0.01}))
    assert [(one.code, one.tensor) for one in of_parts.findings(inputs_are_known=True)] == [
        ("learning-rate-differs", name) for name in found
    ]


@pytest.mark.parametrize(
    ("times", "inputs_are_known", "rate", "found"),
    [
        ({"norm.weight": (0.25, 0.75)}, False, 0.1, ("gradients-not-synchronised", "norm.weight")),
        ({"norm.weight": (2.0, 2.0)}, False, 0.1, ("gradient-scale", "norm.weight")),
        ({"norm.weight": (2.0, 2.0)}, False, 0.2, None),  # its rate may make up for that
        ({"norm.weight": (1.3, 1.3)}, False, 0.1, ("gradient-differs", "norm.weight")),
        (dict.fromkeys(WHOLE, (2.0, 2.0)), True, 0.1, None),  # a scale of everything
        (dict.fromkeys(WHOLE, (2.0, 2.0)) | {"norm.weight": (1.5, 1.5)}, True, 0.1, ("gradient-differs", "in.weight")),
        (dict.fromkeys(WHOLE, (2.0, 2.0)) | {"norm.weight": (1.5, 1.5)}, False, 0.1, None),  # other samples
    ],
)
def test_a_gradient_that_is_not_one_process_s_is_found(
    tmp_path: Path,
    times: dict[str, tuple[float, float]],
    inputs_are_known: bool,
    rate: float,
    found: tuple[str, str] | None,
) -> None:
    gradients = [
        {name: one * times.get(name, (1.0, 1.0))[rank] for name, one in own.items()}
        for rank, own in enumerate(halves(GRADIENTS))
    ]
    whole = parts(tmp_path, gradients, rate=rate)
    assert not whole.agree()
    seen = [(one.code, one.tensor) for one in whole.findings(inputs_are_known=inputs_are_known)]
    assert seen == ([] if found is None else [found])


@pytest.mark.parametrize(("turn", "codes"), [(1.0, []), (1.1, ["gradient-scale"])])
def test_a_scale_of_all_gradients_is_found_where_the_next_ones_differ(
    tmp_path: Path, turn: float, codes: list[str]
) -> None:
    """An optimizer that divides by their size, Adam say, takes the same steps with them."""
    scaled = [{name: one * 0.9 for name, one in own.items()} for own in halves(GRADIENTS)]
    later = [{name: one * (turn if name == "up.weight" else 1) for name, one in own.items()} for own in scaled]
    samples = torch.arange(8.0)
    ranks = recorded(tmp_path / "ranks", halves(WHOLE), scaled, [samples] * 2, later=later)
    alone = recorded(tmp_path / "alone", [WHOLE], [GRADIENTS], [samples], later=[GRADIENTS])
    assert [one.code for one in Parts(ranks, alone).findings(inputs_are_known=True)] == codes


@pytest.mark.parametrize(
    ("inputs", "are_the_same"),
    [
        ([torch.arange(8.0), torch.arange(8.0)], True),  # each rank has all
        ([torch.arange(8.0)[4:], torch.arange(8.0)[:4]], True),
        ([torch.arange(8.0), torch.arange(8.0, 16.0)], False),  # twice as many samples
        ([torch.arange(4.0), torch.arange(4.0)], False),
        ([torch.arange(1.0, 9.0)] * 2, False),
        ([torch.arange(4.0), torch.tensor([4.0, 5, 6, 7, 0, 0])], True),  # filled up with another number of zeros
        ([torch.arange(4.0), torch.tensor([4.0, 5, 6, 7, 0, 1])], False),
    ],
)
def test_inputs_are_those_of_one_process_in_any_order(tmp_path: Path, inputs: list[Tensor], are_the_same: bool) -> None:
    assert parts(tmp_path, halves(GRADIENTS), inputs=inputs).have_the_same_inputs is are_the_same


def test_the_first_stage_of_a_pipeline_has_the_inputs(tmp_path: Path) -> None:
    stages = [{name: one for name, one in WHOLE.items() if (name < "n") is is_first} for is_first in (True, False)]
    gradients = [{name: GRADIENTS[name] for name in stage} for stage in stages]
    assert parts(tmp_path, gradients, stages, [torch.arange(8.0), torch.rand(3)]).have_the_same_inputs


def test_ranks_that_begin_with_one_part_are_found(tmp_path: Path) -> None:
    first = halves(WHOLE)[0]
    (found,) = parts(tmp_path, halves(GRADIENTS), [first, first]).equal_parts()
    assert (found.code, found.tensor) == ("initial-state-differs", "up.weight")


@pytest.mark.parametrize(("agree", "found"), [(False, ["up.weight"]), (True, [])])
def test_a_part_that_begins_as_a_multiple_is_found(tmp_path: Path, *, agree: bool, found: list[str]) -> None:
    """Not where the gradients of the others agree: the script makes up for it."""
    held = [{name: one * 2**0.5 if name == "up.weight" else one for name, one in own.items()} for own in halves(WHOLE)]
    gradients = [{name: one if agree else one + 1 for name, one in own.items()} for own in halves(GRADIENTS)]
    seen = list(parts(tmp_path, gradients, held).scaled_parts())
    assert [one.tensor for one in seen] == found
    assert not found or "1.414 times the values of one process" in seen[0].cause


@pytest.mark.parametrize(("moved", "codes"), [(0.0, ["gradient-differs"]), (0.1, [])])
def test_a_later_gradient_is_found_where_its_step_begins_alike(tmp_path: Path, moved: float, codes: list[str]) -> None:
    """What is carried from step to step by something else than the parameters has come apart."""
    later = [{name: one + 1 for name, one in own.items()} for own in halves(GRADIENTS)]
    begun = [{name: one + moved for name, one in own.items()} for own in halves(WHOLE)]
    ranks = recorded(
        tmp_path / "ranks", halves(WHOLE), halves(GRADIENTS), [torch.zeros(0)] * 2, later=later, begun=begun
    )
    alone = recorded(tmp_path / "alone", [WHOLE], [GRADIENTS], [torch.zeros(0)], later=[GRADIENTS], begun=[WHOLE])
    assert [one.code for one in Parts(ranks, alone).findings(inputs_are_known=False)] == codes
