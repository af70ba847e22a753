"""A script may copy and save its models while it is watched: what watches stays behind."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
from torch import nn

from samestep.instrument.callbacks import Callbacks
from samestep.instrument.training import watch_bare_forward
from samestep.verification.journal import TraceWriter, read
from samestep.verification.recording.inputs import Inputs
from samestep.verification.recording.rows import row_digests


class Wrapper(nn.Module):
    """As DistributedDataParallel holds a model."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 1)

    def forward(self, x: Any) -> Any:
        return self.module(x)


class Told(Callbacks):
    """Counts forwards."""

    def __init__(self) -> None:
        self.count = 0

    def on_event(self, kind: str, **fields: Any) -> None:
        del fields
        self.count += kind == "forward"


def watched(tmp_path: Path) -> tuple[Wrapper, Told, Inputs]:
    model, told = Wrapper(), Told()
    watch_bare_forward(told, model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.samestep_number = 0
    inputs = Inputs(TraceWriter(tmp_path, 0), lambda: None)
    inputs.watch(optimizer)
    return model, told, inputs


def test_a_model_is_told_of_and_its_copies_are_not(tmp_path: Path) -> None:
    model, told, inputs = watched(tmp_path)
    for each in (copy.deepcopy(model), copy.deepcopy(model.module)):
        each(torch.ones(1, 2))
    assert (told.count, inputs.used) == (0, False)
    model.module(torch.ones(1, 2))
    assert (told.count, inputs.used) == (1, True)


def test_a_model_is_saved_whole(tmp_path: Path) -> None:
    model, told, _ = watched(tmp_path)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    back = torch.load(file, weights_only=False)
    assert torch.equal(back(torch.ones(1, 2)), model(torch.ones(1, 2)))
    assert told.count == 1


def test_an_evaluation_may_call_a_part_of_the_model(tmp_path: Path) -> None:
    """`model.module.encoder(x)` of a retrieval; a part that is called with gradients is of the training."""
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    forwarded: list[nn.Module] = []
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.samestep_number = 0
    inputs = Inputs(TraceWriter(tmp_path, 0), lambda: None, lambda part, _: forwarded.append(part))
    inputs.watch(optimizer)
    model["encoder"](torch.ones(1, 2))
    assert (inputs.used, forwarded) == (True, [])
    with torch.no_grad():
        model["encoder"](torch.ones(1, 2))
    assert forwarded == [model["encoder"]]


def test_what_a_model_has_computed_is_no_sample_of_another(tmp_path: Path) -> None:
    """The pictures of a generator differ where its weights do; its noise, and real pictures, are samples."""
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    inputs = Inputs(TraceWriter(tmp_path, 0), lambda: 0)
    for number, model in enumerate((generator, critic)):
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.samestep_number = number
        inputs.watch(optimizer)
    noise, real = torch.randn(4, 2), torch.randn(5, 3)
    critic(generator(noise).detach())
    critic(generator(noise))
    critic(real)
    told = [(len(event["rows"]), event["rows"]) for event in read(tmp_path, 0) if event["kind"] == "input"]
    assert told == [(4, row_digests([noise])), (4, row_digests([noise])), (5, row_digests([real]))]
