"""A byte that changes on its way from memory to the disk is found at once: the digests are those of the memory."""

from __future__ import annotations

import random

import pytest
import torch
from saved import train

import samestep
from samestep.checkpoints import directory, integrity
from samestep.checkpoints.integrity import verify
from samestep.errors import CheckpointError

SOME, MANY = 12, 1000
ORIGINAL = integrity.open_private


class FaultyFile:
    """A file whose `at`-th byte is written wrongly, in one of several ways."""

    def __init__(self, file, at, kind):
        self.file, self.left, self.kind = file, at, kind

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()

    def write(self, piece):
        data = bytearray(piece.encode() if isinstance(piece, str) else piece)
        if 0 <= self.left < len(data):
            if self.kind == "flipped":
                data[self.left] ^= 1 << (self.left % 8)
            elif self.kind == "lost":  # the rest of this write
                del data[self.left :]
            elif self.kind == "inverted":  # a block
                data[self.left : self.left + 512] = bytes(255 - one for one in data[self.left : self.left + 512])
            else:
                data.insert(self.left, 0)
        self.left -= len(piece)
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.fixture(scope="module")
def sizes(tmp_path_factory):
    """How many bytes each file of a save has."""
    path = tmp_path_factory.mktemp("sizes")
    with samestep.world(device="cpu") as world:
        folder = samestep.checkpoint(path, world, model=net()).save()
    return {entry.name: entry.stat().st_size for entry in folder.iterdir()}


def net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(9, 20), torch.nn.Linear(20, 3))


NUMBERS = [*range(SOME), *(pytest.param(number, marks=pytest.mark.prove) for number in range(SOME, MANY))]


@pytest.mark.parametrize("number", NUMBERS)
def test_what_was_written_wrongly_is_an_error_and_the_save_before_stays(tmp_path, monkeypatch, sizes, number):
    stream = random.Random(number)
    name, kind = stream.choice(sorted(sizes)), stream.choice(["flipped", "lost", "inverted", "inserted"])
    at, changed = stream.randrange(sizes[name]), []

    def faulty(path, mode, **more):
        if path.name != name:
            return ORIGINAL(path, mode, **more)
        changed.append(path)
        return FaultyFile(ORIGINAL(path, "xb"), at, kind)

    with samestep.world(device="cpu") as world:
        model = net()
        state = samestep.checkpoint(tmp_path, world, keep=1, model=model)
        first = state.save()
        with torch.no_grad():
            model[0].weight += 1
        for module in (integrity, directory):
            monkeypatch.setattr(module, "open_private", faulty)
        state.step = 1
        with pytest.raises(CheckpointError, match="does not read back as it was in memory"):
            state.save()
        verify(first)  # nothing older was deleted
    assert changed
    monkeypatch.undo()
    with samestep.world(device="cpu") as world:
        assert samestep.checkpoint(tmp_path, world, model=net()).resumed.step == 0
    assert (tmp_path / "step-00000001.bad").exists()


def test_a_byte_that_flips_while_the_training_goes_on_is_reported_and_training_continues(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(integrity, "open_private", lambda path, mode: FaultyFile(ORIGINAL(path, mode), 900, "flipped"))
    with pytest.raises(CheckpointError, match="does not read back"):
        train(tmp_path, steps=3)
    assert "training continues" in capsys.readouterr().err
