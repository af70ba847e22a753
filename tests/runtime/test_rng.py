import random

import numpy as np
import torch

from samestep.runtime.rng import generator, seed_everything
from samestep.seeding import derive_seed


def test_a_stream_never_changes():
    assert derive_seed(0, "dropout", 1) == 8865190094690065933


def test_streams_of_other_names_ranks_and_seeds_differ():
    seeds = {derive_seed(s, name, rank) for s in range(4) for name in ("a", "b") for rank in range(4)}
    assert len(seeds) == 32
    assert derive_seed(0, "a", 1) != derive_seed(0, "a", "1")


def test_seeding_reaches_python_numpy_and_torch():
    draws = []
    for _ in range(2):
        seed_everything(3, "model")
        draws.append((random.random(), float(np.random.random()), torch.rand(()).item()))
    assert draws[0] == draws[1]


def test_a_generator_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    torch.rand(3, generator=generator(0, "purpose"))
    assert torch.equal(before, torch.get_rng_state())
