"""Handwritten digits, by a network that is cut into two stages where measured times say, with dropout and checkpoints.

python examples/pipeline_training.py                    # one process: the same micro-batches, one after another
samestep run -n 2 examples/pipeline_training.py         # two stages
samestep run -n 4 examples/pipeline_training.py         # two replicas of two stages
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep


def block(width):
    """Returns a layer of the body."""
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.ReLU(), nn.Dropout(0.1))


def network(width=48, depth=6):
    """Returns the network, for images of 8 x 8 points."""
    head = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(width * 16, 128), nn.ReLU(), nn.Linear(128, 10))
    return nn.Sequential(nn.Conv2d(1, width, 3, padding=1), *(block(width) for _ in range(depth)), head)


def accuracy(outputs, targets):
    """Returns the share of the digits that are right."""
    return (outputs.argmax(1) == targets).double().mean()


def main():
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoint", help="a directory to save in, and to go on from")
    parser.add_argument("--picture", metavar="FILE.html", help="draw a step, predicted and achieved")
    options = parser.parse_args()
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    training, held_out = TensorDataset(images[:1437], labels[:1437]), TensorDataset(images[1437:], labels[1437:])
    with samestep.world(pipeline=2) as world:
        model = network()
        plan = samestep.plan_pipeline(model, training[:64], F.cross_entropy, stages=2)
        if world.is_first:
            print(plan)
        stage = samestep.pipeline(model, world, plan)
        optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
        batches = samestep.shards(training, world, batch_size=64)
        state = samestep.checkpoint(options.checkpoint, world, model=stage, optimizer=optimizer, data=batches)
        for epoch in state.epochs(options.epochs):
            for batch in batches:
                stage.step(batch)
                samestep.clip_grad_norm_(stage, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                state.commit()
            scores = samestep.evaluate(
                lambda batch: (stage(batch[0]), batch[1]),
                held_out,
                world,
                batch_size=128,
                metrics={"accuracy": accuracy},
            )
            if world.is_first:
                print(f"epoch {epoch + 1}: loss {batches.loss:.3f}, {scores['accuracy']:.1%} of the held-out digits")
        report = stage.report()
        if world.is_first:
            print(report)
            if options.picture:
                report.gantt(options.picture)


if __name__ == "__main__":
    main()
