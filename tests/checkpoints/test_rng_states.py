from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import samestep
from samestep.checkpoints.encoder import Encoder
from samestep.checkpoints.extra_state import RngStates
from samestep.checkpoints.integrity import read_manifest
from samestep.checkpoints.manifest import MANIFEST, decode, to_text
from samestep.errors import CheckpointError, SamestepError

STATES = RngStates()


def draw():
    numbers = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]
    return [*numbers, torch.rand(1).item(), torch.randn(1).item()]


STATES = RngStates()


def drawn_before_and_after(_):
    with samestep.world(device="cpu") as world:
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(100 + world.rank)
        draw()  # leaves half a pair of normal numbers behind in Python's and NumPy's streams
        encoder = Encoder()
        tree = encoder.encode(STATES.capture(world, {}), "random")
        went_on = draw()
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        STATES.restore(decode(tree, encoder.tensors), world, {})
        return went_on, draw()


def test_every_stream_goes_on_where_it_stood():
    went_on, restored = drawn_before_and_after(None)
    assert restored == went_on


def test_each_rank_gets_its_own_streams_back(two_ranks):
    (first, first_again), (second, second_again) = two_ranks(drawn_before_and_after, None)
    assert (first_again, second_again) == (first, second)
    assert first != second


# --- what no run has saved ----------------------------------------------------------------------


def changed(*path, to):
    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        saved[path[-1]] = to

    return change


def dropped(*path):
    def change(saved):
        for key in path[:-1]:
            saved = saved[key]
        del saved[path[-1]]

    return change


MALFORMED = {
    "no streams": dropped("streams"),
    "no rest": dropped("rest"),
    "a list of streams": changed("streams", to=[1, 2]),
    "no row for this rank": changed("streams", "torch", to=torch.empty(0, 5056, dtype=torch.uint8)),
    "no rest for this rank": changed("rest", to=[]),
    "a short row": changed("streams", "torch", to=torch.zeros(1, 10, dtype=torch.uint8)),
    "zeros": changed("streams", "torch", to=torch.zeros(1, 5056, dtype=torch.uint8)),
    "floats": changed("streams", "torch", to=torch.zeros(1, 5056)),
    "a number for a stream": changed("streams", "torch", to=3),
    "too few words of python": changed("streams", "python", to=torch.zeros(1, 7, dtype=torch.int64)),
    "negative words of python": changed("streams", "python", to=torch.full((1, 625), -1)),
    "no python": dropped("streams", "python"),
    "an unknown version of python's": changed("rest", 0, "python", to=[99, None]),
    "nothing about python": changed("rest", 0, "python", to=None),
    "a position far behind numpy's words": changed("rest", 0, "numpy", 1, to=10**6),
    "a negative position in numpy's words": changed("rest", 0, "numpy", 1, to=-5),
    "a text for a position": changed("rest", 0, "numpy", 1, to="0"),
    "too few words of numpy": changed("streams", "numpy", to=torch.zeros(1, 5, dtype=torch.int64)),
    "another generator of numpy": changed("rest", 0, "numpy", 0, to="PCG64"),
    "too few entries for numpy": changed("rest", 0, "numpy", to=[1]),
    "a text": lambda saved: saved.update(streams="rm -rf", rest="rm -rf"),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_cannot_be_a_stream_is_refused_and_no_stream_is_touched(change):
    with samestep.world(device="cpu") as world:
        saved = copy.deepcopy(STATES.capture(world, {}))
        went_on = draw()
        STATES.restore(saved, world, {})
        change(saved)
        with pytest.raises(CheckpointError, match=r"the saved random streams of rank 0 cannot be what a run has saved"):
            STATES.restore(saved, world, {})
        assert draw() == went_on


def resumed_from_a_row_too_few(path):
    with samestep.world(device="cpu") as world:
        samestep.checkpoint(path, world, model=torch.nn.Linear(2, 1)).save()
    if world.rank == 0:
        folder = Path(path) / "step-00000000"
        manifest = read_manifest(folder)
        manifest.extra["dict"]["rng"]["dict"]["rest"].pop()
        (folder / MANIFEST).write_text(to_text(replace(manifest)))
    with samestep.world(device="cpu") as world:
        world.barrier()
        try:
            samestep.checkpoint(path, world, model=torch.nn.Linear(2, 1))
        except SamestepError as error:
            return type(error).__name__, str(error)


def test_streams_that_are_malformed_for_one_rank_are_refused_on_every_rank(tmp_path, two_ranks):
    (first, told), (second, own) = two_ranks(resumed_from_a_row_too_few, str(tmp_path))
    assert (first, second) == ("CheckpointError", "CheckpointError")
    assert own.startswith("the saved random streams of rank 1 cannot be what a run has saved: IndexError")
    assert told.startswith("rank 1 failed: CheckpointError: the saved random streams of rank 1")
