"""Which steps are recorded, and compared: not those that torch takes for itself, nor those from other parameters."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import samestep

LOADS = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    model, kept = nn.Linear(4, 1), None
    for _ in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if kept is not None:
            set_optimizer_state_dict(model, optimizer, kept)
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        kept = get_optimizer_state_dict(model, optimizer)
    dist.destroy_process_group()
"""
SEARCHES = """
    import torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randn(16, 1)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(20):
        with torch.no_grad():
            centre, slope = model.weight.clone(), torch.zeros_like(model.weight)
            for member in range(dist.get_rank(), 4, dist.get_world_size()):
                noise = torch.randn(1, 4, generator=torch.Generator().manual_seed(4 * step + member))
                model.weight.copy_(centre + 0.1 * noise)
                slope += nn.functional.mse_loss(model(x), y) * noise / 4
            model.weight.copy_(centre)
            dist.all_reduce(slope)
        model.weight.grad, model.bias.grad = slope, torch.zeros(1)
        optimizer.step()
    dist.destroy_process_group()
"""

BESIDE = """
    import torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.ndim == 1], lr=0.1)
    for step in range(4):
        rows = torch.arange(16 * step, 16 * step + 16)[rank::world]
        model.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 2:
                    p.sub_(p.grad.sign(), alpha=0.01{})
        optimizer.step()
    dist.destroy_process_group()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_step_by_which_torch_prepares_an_optimizer_s_state_is_none_of_the_script_s(tmp_path: Path) -> None:
    report = samestep.verify(script(tmp_path, LOADS))
    assert report.steps == 4
    assert report.errors == []


@pytest.mark.parametrize(("factor", "found"), [("", []), (" * world", [("update-differs", "0.weight", 2.0)])])
def test_what_own_code_steps_beside_an_optimizer_is_compared(
    tmp_path: Path, factor: str, found: list[tuple[str, str, float]]
) -> None:
    """Its rate is scaled with the ranks, and the batch of all of them is that of one process."""
    report = samestep.verify(script(tmp_path, BESIDE.replace("{}", factor)))
    assert [(one.code, one.tensor, one.factor) for one in report.errors] == found
    assert report.verdict == ("different" if found else "same")


def test_a_search_without_a_backward_pass_is_not_judged_from_what_it_has_tried(tmp_path: Path) -> None:
    """Parameters that it tries are no steps; one process draws the noise of all members, which the ranks share out."""
    report = samestep.verify(script(tmp_path, SEARCHES))
    assert (report.errors, report.verdict, report.coverage["gradients"]) == ([], "same", "agrees")
