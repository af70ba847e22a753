"""Local tensors of DTensors, of whose gradient each rank has a part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from journals import Event, record

import samestep
from samestep.verification.locating import _partial_gradient
from samestep.verification.recording.parts import Due, Part, has_parts, joined

SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, distribute_tensor
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
gain = torch.nn.Parameter(distribute_tensor(torch.randn(4), mesh, [Replicate()]))
weight = torch.nn.Parameter(torch.randn(8, 4).chunk(size)[rank].clone())
bias = torch.nn.Parameter(torch.randn(8).chunk(size)[rank].clone())
optimizer = torch.optim.SGD([gain, weight, bias], lr=0.01, foreach=False)
x = torch.randn(64, 4)
for step in range(12):
    part = gain.to_local(PLACEMENTS)
    out = (x[step : step + 16] * part) @ weight.T + bias
    optimizer.zero_grad()
    (out - 1).square().sum(1).mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_part_of_a_gradient_is_added_up_where_that_is_declared(tmp_path: Path, *, is_declared: bool) -> None:
    placements = "grad_placements=[Partial()]" if is_declared else ""
    (script := tmp_path / "train.py").write_text(SCRIPT.replace("PLACEMENTS", placements), encoding="utf-8")
    report = samestep.verify(script)
    assert report.verdict == ("same" if is_declared else "different"), str(report)
    lines = [(found.where or "").rpartition(":")[2] for found in report.errors]
    assert lines == ([] if is_declared else ["15"])
    assert all("grad_placements" in (found.fix or "") for found in report.errors)


def gradient(number: int, line: int, of: str) -> Event:
    return {"kind": "local_gradient", "window": 0, "number": number, "where": f"train.py:{line}", "of": of}


def test_the_one_nearest_to_the_loss_is_named() -> None:
    """Those before it get what it has made of the gradient."""
    first = [gradient(2, 30, "same"), gradient(1, 20, "a"), gradient(0, 10, "b")]
    other = [gradient(2, 30, "same"), gradient(1, 20, "c"), gradient(0, 10, "d")]
    assert _partial_gradient(record(first, other)) == "train.py:20"
    assert _partial_gradient(record(first, first)) is None
    assert _partial_gradient(record(first, [])) is None


def test_parts_of_a_sum_are_added_up_also_of_one_rank() -> None:
    ones = torch.ones(2)
    assert has_parts({"w": Due(ones)})
    assert has_parts([Part((4,), (0,), ones)])
    assert not has_parts({"w": ones})
    assert joined([{"w": Due(ones)}])["w"].tolist() == [1.0, 1.0]
    assert joined([{"w": Due(ones)}, {"w": Due(2 * ones)}])["w"].tolist() == [3.0, 3.0]
