"""A small convolutional network on scikit-learn's handwritten digits: the smallest real training.

    python -m samestep.recipes.digits
    samestep run -n 2 -m samestep.recipes.digits --checkpoint runs/digits
    torchrun --nproc-per-node 2 -m samestep.recipes.digits

1797 images of 8 x 8 pixels come with scikit-learn, so nothing is downloaded. A fixed fifth of them, 360, is held
out whatever the seed. Neither 1437 nor 360 divides by most numbers of ranks, and nothing is padded or dropped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep.recipes import common
from samestep.recipes.common import cosine
from samestep.recipes.progress import ProgressDisplay, percent

__all__ = ["DigitNet", "load_digits", "main"]

HELD_OUT = 360
SMOOTHING = 0.1
WARM_UP = 20  # steps
SPLIT_SEED = 0  # of the split alone; never the run's seed, or two seeds could not be compared


class DigitNet(nn.Module):
    """Images `B x 1 x 8 x 8` in 0..1 to scores `B x 10`; B may be 0."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.conv3 = nn.Conv2d(64, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 2 * 2, 128)
        self.out = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores, not yet probabilities."""
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.max_pool2d(F.relu(self.conv3(x)), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))  # type: ignore[no-any-return]


def load_digits(dtype: torch.dtype = torch.float32) -> tuple[TensorDataset, TensorDataset]:
    """Training set and held-out set: samples `(image 1 x 8 x 8 in 0..1, digit)`, 1437 and 360 of them."""
    from sklearn.datasets import load_digits as load

    bunch = load()
    images = torch.from_numpy(bunch.images / 16).to(dtype).unsqueeze(1)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
    labels = torch.from_numpy(bunch.target).long()
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held_out], labels[held_out])


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0, or the exit code of an error told in one line."""
    args = parser().parse_args(argv)
    return common.run_main("digits", lambda: train(args))


def parser() -> argparse.ArgumentParser:
    made = common.parser("digits", "Train a small CNN on scikit-learn's handwritten digits.")
    common.add_training_options(made, epochs=15, batch_size=64, lr=3e-3)
    return made


class Training:
    """Model, optimizer, schedule and loader. Collective: every rank must make one."""

    def __init__(self, args: argparse.Namespace, world: samestep.World, train_set: TensorDataset) -> None:
        network = DigitNet().to(world.device, common.dtype(args.precision))
        self.model = samestep.replicate(network, world, compress=args.compress)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.05)
        self.batches = samestep.shards(
            train_set,
            world,
            batch_size=args.batch_size,
            micro_batch_size=args.micro_batch_size,
            workers=args.workers,
            seed=args.seed,
        )
        self.schedule = cosine(self.optimizer, args.epochs * self.batches.steps_per_epoch, warm_up=WARM_UP)
        self.precision = args.precision

    def scores(self, images: torch.Tensor) -> torch.Tensor:
        """The model's forward, in the precision asked for."""
        with common.autocast(self.precision, images.device):
            return self.model(images)  # type: ignore[no-any-return]

    def steps(self) -> Iterator[None]:
        """One pass over the training set; yields after each optimizer step."""
        for images, labels in self.batches:
            scores = common.at_least_float32(self.scores(images))
            losses = F.cross_entropy(scores, labels, label_smoothing=SMOOTHING, reduction="none")
            self.batches.mean(losses).backward()  # type: ignore[no-untyped-call]
            if self.batches.step_ends:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                yield


def train(args: argparse.Namespace) -> None:
    """The training, its evaluation and its summary. Collective: every rank must call."""
    torch.set_num_threads(1)  # so small a model that threads would wait for each other longer than they work
    train_set, held_out = load_digits(common.dtype(args.precision))
    with samestep.world(
        backend=args.backend, device=args.device, seed=args.seed, virtual_ranks=args.virtual_ranks
    ) as world:
        training = Training(args, world, train_set)
        batches = training.batches
        state = common.make_checkpoint(
            args, world, batches, model=training.model, optimizer=training.optimizer, schedule=training.schedule
        )
        with ProgressDisplay("digits", world, batches, epochs=args.epochs, items=len(train_set)) as show:
            accuracy = None
            for epoch in state.epochs(args.epochs):
                show.begin(epoch)
                for _ in training.steps():
                    state.commit()
                    show.step()
                accuracy = held_out_accuracy(training, held_out, world)
                show.result(held_out=percent(accuracy))
            if accuracy is None:  # the checkpoint held a finished training
                accuracy = held_out_accuracy(training, held_out, world)
            show.summary(f"{percent(accuracy)} of {len(held_out)} held-out samples right", args.checkpoint)


def held_out_accuracy(training: Training, held_out: TensorDataset, world: samestep.World) -> float:
    """The share of held-out digits named right, each counted once. Collective: every rank must call."""

    def predict(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = batch
        return training.scores(images).argmax(1), labels

    metrics = {"accuracy": lambda named, labels: float((named == labels).double().mean())}
    return float(samestep.evaluate(predict, held_out, world, batch_size=512, metrics=metrics)["accuracy"])


if __name__ == "__main__":
    raise SystemExit(main())
