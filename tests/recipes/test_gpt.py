from __future__ import annotations

import pytest
import torch

from samestep.recipes.text import GPT


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(257, context=16, layers=2, heads=2, width=32).eval()


def test_scores_of_a_position_depend_on_no_later_symbol(model):
    one = torch.randint(257, (1, 16))
    other = one.clone()
    other[0, 10:] = 3
    assert torch.allclose(model(one)[0, :10], model(other)[0, :10], atol=1e-6)
    assert not torch.allclose(model(one)[0, 10:], model(other)[0, 10:], atol=1e-3)


def test_every_earlier_symbol_has_a_say(model):
    one = torch.randint(257, (1, 16))
    for place in range(16):
        other = one.clone()
        other[0, place] = (one[0, place] + 1) % 257
        assert not torch.equal(model(one)[0, -1], model(other)[0, -1])


def test_an_empty_batch_gives_no_scores_and_a_backward(model):
    scores = model(torch.zeros(0, 16, dtype=torch.int64))
    assert scores.shape == (0, 16, 257)
    scores.sum().backward()


def test_the_head_shares_its_weights_with_the_embedding(model):
    blocks = 2 * (12 * 32 * 32 + 13 * 32)  # attention 4, perceptron 8 squares; their biases and norms
    assert sum(parameter.numel() for parameter in model.parameters()) == 257 * 32 + 16 * 32 + blocks + 2 * 32


def test_a_fresh_model_is_nearly_undecided(model):
    scores = model(torch.randint(257, (8, 16))).detach().flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(scores, torch.arange(128))
    assert abs(float(loss) - 5.549) < 0.1  # the logarithm of 257


def test_a_text_goes_on_beyond_the_context(model):
    drawn = [model.continued([1, 2], 20, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert len(drawn[0]) == 20
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
