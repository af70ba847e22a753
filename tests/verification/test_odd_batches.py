"""Batches that are no plain tensors: what cannot be written down, or put together, does not make a script different."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import samestep
from samestep.verification.journal import TraceWriter
from samestep.verification.judging.record import Record
from samestep.verification.recording import rows
from samestep.verification.recording.script_observer import StopRecording
from samestep.verification.reference.replay import Replay

SCRIPT = """
import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def collate(samples):
    x, y = (torch.stack(column) for column in zip(*samples))
    return {"x": x.numpy(), "y": y, "graph": torch.eye(len(samples)).to_sparse(), "how": lambda value: 2 * value}

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 8), torch.randn(64, 3))
loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset), collate_fn=collate)
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in loader:
    optimizer.zero_grad()
    (batch["how"](model(torch.from_numpy(batch["x"]))) - batch["y"]).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_script_whose_batches_hold_arrays_functions_and_sparse_tensors_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(SCRIPT)
    report = samestep.verify(tmp_path / "odd.py")
    report.require_same()
    assert report.coverage["gradients"] == "agrees as declared"  # of BatchNorm, by the samples of each rank


DETECTION = """
import torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

class Boxes(Dataset):
    pictures, boxes = torch.randn(64, 3, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(256.0) / 256
    def __len__(self): return 64
    def __getitem__(self, index): return self.pictures[index], {"boxes": self.boxes[4 * index : 4 * index + 4]}

dist.init_process_group("gloo")
torch.manual_seed(0)
loader = DataLoader(Boxes(), 4, sampler=DistributedSampler(Boxes()), collate_fn=lambda batch: tuple(zip(*batch)))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(48, 4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for pictures, targets in loader:
    optimizer.zero_grad()
    boxes = torch.stack([target["boxes"] for target in targets])
    (model(torch.stack(pictures)) - boxes).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_script_whose_pictures_nobody_has_stacked_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "detection.py").write_text(DETECTION)
    report = samestep.verify(tmp_path / "detection.py")
    report.require_same()
    assert report.coverage["gradients"] == "agrees"


def test_rows_are_told_apart_by_what_has_rows() -> None:
    x = torch.arange(6.0).view(3, 2)
    assert rows.row_digests((x, torch.eye(3).to_sparse())) == rows.row_digests((x,))
    assert rows.row_digests(torch.eye(3).to_sparse()) == []
    assert rows.row_digests(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)) == []


def test_the_script_alone_ends_where_no_more_batches_were_kept(tmp_path: Path) -> None:
    alone: Any = Replay.__new__(Replay)
    alone.journal, alone.record = TraceWriter(tmp_path, 0), Record(tmp_path, [])
    with pytest.raises(StopRecording):
        alone._joined([(0, {"kept": None, "room": False, "size": 2, "indices": [0, 1]})], None)
    assert json.loads((tmp_path / "rank0.jsonl").read_text())["why"] == "there was no more room to keep them"


HALVES = """
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = [(torch.randn(8), torch.randn(8)) for _ in range(32)]
    sampler = DistributedSampler(data, shuffle=False)
    collate = lambda pairs: torch.stack([good for good, _ in pairs] + [bad for _, bad in pairs])
    loader = DataLoader(data, batch_size=8 // dist.get_world_size(), sampler=sampler, collate_fn=collate)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        good, bad = model(x).chunk(2)
        loss = -torch.nn.functional.logsigmoid(good - bad).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def test_batches_of_chosen_and_rejected_halves_are_made_of_the_samples_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(HALVES), encoding="utf-8")
    report = samestep.verify(path, ranks=2)
    assert (report.verdict, report.findings) == ("same", []), report
