"""A training in which the state after k steps is known in whole numbers, so that a mixture of two steps shows anywhere.

The gradient of every weight is 1 on any number of ranks, exactly: a loss per sample that is the sum of all weights, and
batches that are powers of two. With a momentum and a learning rate of 1, after k steps:

    momentum    k                   weights    -k (k + 1) / 2          buffer "steps"    k
    data        k mod 8 steps into epoch k div 8, and a ledger with the digest of k steps
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys

import torch
from torch import nn

import samestep
from samestep.checkpoints import writer
from samestep.data.ledger import START, chain_digest
from samestep.data.order import SampleOrder

SAMPLES, BATCH, EPOCHS = 64, 8, 10_000  # never over
STEPS_PER_EPOCH = SAMPLES // BATCH
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.scandir"}


class Counting(nn.Module):
    """Several weights, so that a save takes a while, and a count of its steps."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(20_000, dtype=torch.float64)) for _ in range(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        return sum(weight.sum() for weight in self.weights) + 0.0 * x


def train(path, every, marks):
    """Trains until somebody kills it; rank 0 puts a byte into the pipe `marks` after each commit, if there is room."""
    data = torch.utils.data.TensorDataset(torch.arange(float(SAMPLES), dtype=torch.float64))
    mark = os.open(marks, os.O_WRONLY | os.O_NONBLOCK)
    with samestep.world(device="cpu") as world:
        model = samestep.replicate(Counting(), world)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=1.0)
        batches = samestep.shards(data, world, batch_size=BATCH, seed=5)
        state = samestep.checkpoint(path, world, every=every, model=model, optimizer=optimizer, data=batches)
        for _ in state.epochs(EPOCHS):
            for (x,) in batches:
                batches.mean(model(x)).backward()
                optimizer.step()
                optimizer.zero_grad()
                model.module.steps += 1
                state.commit()
                if world.is_first:
                    with contextlib.suppress(BlockingIOError):
                        os.write(mark, b".")


def train_to(operation, path, marks):
    """Trains, and rank 0 kills itself at its so manieth operation on files in `path`; counted before and after each."""
    left = [operation if os.environ["RANK"] == "0" else 0]

    def count():
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(function):
        def call(*arguments, **options):
            count()
            result = function(*arguments, **options)
            count()
            return result

        return call

    def audit(event, arguments):
        if event in OPERATIONS and (event != "open" or str(arguments[0]).startswith(path)):
            count()

    sys.addaudithook(audit)
    os.fsync, writer.write_payload = counted(os.fsync), counted(writer.write_payload)
    train(path, 1, marks)


def differences(manifest, tensors, state):
    """Yields what in a checkpoint is not the state after its step."""
    step = manifest.step
    expected = {"model/steps": step}
    for number in range(4):
        expected[f"model/weights.{number}"] = -step * (step + 1) // 2
        if step:
            expected[f"optimizer/state/{number}/momentum_buffer"] = step
    for name, value in expected.items():
        if name not in tensors:
            yield f"{name} is not there"
        elif not bool((tensors[name] == value).all()):
            yield f"{name} holds {tensors[name].unique().tolist()[:3]}, not {value}"
    if state["epoch"] * STEPS_PER_EPOCH * BATCH + state["cursor"] != step * BATCH:
        yield f"the data stand in epoch {state['epoch']} at {state['cursor']}"
    if state["ledger"]["digest"] != digest_of(step):
        yield f"the ledger's digest is not that of {step} steps"
    if manifest.epoch not in {step // STEPS_PER_EPOCH, max(0, step - 1) // STEPS_PER_EPOCH}:
        yield f"{manifest.epoch} epochs are finished"


_DIGESTS = [START]


def digest_of(step):
    """The digest of the first `step` steps; those of the steps before are kept."""
    while len(_DIGESTS) <= step:
        epoch, start = divmod(len(_DIGESTS) - 1, STEPS_PER_EPOCH)
        indices = SampleOrder(SAMPLES, 5, epoch).take(start * BATCH, (start + 1) * BATCH)
        _DIGESTS.append(chain_digest(_DIGESTS[-1], epoch, indices))
    return _DIGESTS[step].hex()


def seeded(number, name):
    """The random numbers of one kill."""
    return random.Random(f"{name}/{number}")
