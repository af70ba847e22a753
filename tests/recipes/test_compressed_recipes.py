"""The recipes trained with compressed gradients: as good as without."""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from torch.nn import functional as F

import samestep
from samestep.compress import CODEC_NAMES
from samestep.recipes import corpus, digits, text

SEEDS = range(5)
TEXT_SEEDS = range(2)  # a training takes minutes; docs/benchmarks.md has five
AS_GOOD = ("fp16", "bf16", "int8")  # of the others docs/benchmarks.md has figures, and no target


def digits_trained(seed, codec, *more):
    """Returns the loss that is trained, and the accuracy, on the held-out samples."""
    torch.set_num_threads(1)
    asked = digits.parser().parse_args(["--seed", str(seed), *more])
    asked.compress = codec
    train_set, held_out = digits.load_digits()
    with samestep.world(seed=seed) as world:
        training = digits.Training(asked, world, train_set)
        for _ in range(asked.epochs):
            for _ in training.steps():
                training.batches.commit()

        def predicted(batch):
            return training.scores(batch[0]), batch[1]

        smoothing = digits.SMOOTHING
        metrics = {"loss": lambda outputs, targets: float(F.cross_entropy(outputs, targets, label_smoothing=smoothing))}
        metrics["accuracy"] = lambda outputs, targets: float((outputs.argmax(1) == targets).double().mean())
        found = samestep.evaluate(predicted, held_out, world, batch_size=360, metrics=metrics)
        return found["loss"], found["accuracy"]


def text_trained(seed, codec, *more):
    """Returns the held-out bits per byte."""
    torch.set_num_threads(1)
    asked = text.parser().parse_args(["--seed", str(seed), *more])
    asked.compress = codec
    folder = corpus.standard_library()
    train_set, held_out = corpus.train_and_held_out(folder, total=asked.bytes, context=asked.context)
    with samestep.world(seed=seed) as world:
        training = text.Training(asked, world, train_set)
        for _ in range(asked.epochs):
            for _ in training.steps():
                training.batches.commit()
        return text.bits_per_byte(training, held_out, world, asked.batch_size)


@pytest.mark.prove
@pytest.mark.parametrize("codec", sorted(CODEC_NAMES))
def test_digits_learn_under_every_codec(two_ranks, codec):
    for loss, accuracy in two_ranks(digits_trained, 0, codec, "--epochs", "2"):
        assert accuracy > 0.5, (loss, accuracy)


@pytest.fixture(scope="module")
def digits_without(two_ranks):
    return [two_ranks(digits_trained, seed, None, timeout=600)[0] for seed in SEEDS]


@pytest.fixture(scope="module")
def text_without(two_ranks):
    return [two_ranks(text_trained, seed, None, timeout=1800)[0] for seed in TEXT_SEEDS]


@pytest.mark.prove
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("codec", AS_GOOD)
def test_digits_come_as_far_as_without(two_ranks, digits_without, codec):
    found = [two_ranks(digits_trained, seed, codec, timeout=600)[0] for seed in SEEDS]
    (loss, accuracy), (loss_with, accuracy_with) = (
        tuple(map(mean, zip(*each, strict=True))) for each in (digits_without, found)
    )
    print(f"digits {codec}: loss {loss:.4f} and {loss_with:.4f}, accuracy {accuracy:.4f} and {accuracy_with:.4f}")
    print("  ", *(f"{before:.4f}/{after:.4f}" for (before, _), (after, _) in zip(digits_without, found, strict=True)))
    assert accuracy_with > accuracy - 0.01
    assert loss_with < 1.01 * loss


@pytest.mark.prove
@pytest.mark.timeout(9000)
@pytest.mark.parametrize("codec", AS_GOOD)
def test_text_comes_as_far_as_without(two_ranks, text_without, codec):
    found = [two_ranks(text_trained, seed, codec, timeout=1800)[0] for seed in TEXT_SEEDS]
    print(f"text {codec}: bits per byte {mean(text_without):.4f} and {mean(found):.4f}")
    print("  ", *(f"{before:.4f}/{after:.4f}" for before, after in zip(text_without, found, strict=True)))
    assert mean(found) < 1.01 * mean(text_without)
