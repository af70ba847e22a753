"""Calls that are the same are told of as the same, whatever the ranks leave to torch's defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from samestep.instrument.collective_call import CollectiveCall
from samestep.verification.online.tracking import CallStream

T = torch.zeros(2)
SAME = [  # one call in two ways
    ("gather", ((T, [T, T]), {}), ((T,), {"dst": 0})),
    ("gather", ((T, [T, T], 0), {}), ((T,), {"dst": 0})),
    ("scatter", ((T, [T, T]), {}), ((T,), {"src": 0})),
    ("gather_object", ((T, [None, None]), {}), ((T,), {"dst": 0})),
    ("broadcast", ((T, 1), {}), ((T,), {"src": 1})),
    ("reduce", ((T, 0), {}), ((T,), {"dst": 0, "op": dist.ReduceOp.SUM})),
    ("all_reduce", ((T,), {}), ((T, dist.ReduceOp.SUM), {})),
]
OTHER = [
    ("gather", ((T,), {"dst": 1}), ((T,), {})),
    ("broadcast", ((T, 1), {}), ((T, 0), {})),
]


def told(name: str, args: Any, kwargs: Any) -> dict[str, Any]:
    """What verify writes down of a call."""
    call = CollectiveCall(getattr(dist, name), name, args, kwargs)
    return {key: call.description[key] for key in ("op", "reduce", "root")}


def counted(name: str, args: Any, kwargs: Any) -> list[int]:
    """The digest that --check keeps of a call."""
    calls = CallStream()
    calls.note(CollectiveCall(getattr(dist, name), name, args, kwargs), 0)
    return calls.state


@pytest.mark.parametrize(("name", "one", "other"), SAME)
def test_a_default_that_is_left_out_makes_no_other_call(name: str, one: Any, other: Any) -> None:
    assert told(name, *one) == told(name, *other)
    assert counted(name, *one) == counted(name, *other)


@pytest.mark.parametrize(("name", "one", "other"), OTHER)
def test_another_root_makes_another_call(name: str, one: Any, other: Any) -> None:
    assert told(name, *one) != told(name, *other)
    assert counted(name, *one) != counted(name, *other)


def test_summing_is_told_from_taking_the_largest() -> None:
    assert told("all_reduce", (T,), {}) != told("all_reduce", (T, dist.ReduceOp.MAX), {})
