"""ResNet on ImageNet, with the options of PyTorch's official example and an evaluation that counts each image once.

    python -m samestep.recipes.imagenet -a resnet50 /data/imagenet
    samestep run -n 8 -m samestep.recipes.imagenet -a resnet50 --checkpoint runs/resnet50 /data/imagenet
    torchrun --nproc-per-node 8 -m samestep.recipes.imagenet -a resnet50 --precision bf16 /data/imagenet
    python -m samestep.recipes.imagenet --multiprocessing-distributed -a resnet50 /data/imagenet

The folder holds `train/<class>/*.JPEG` and `val/<class>/*.JPEG`. The official example evaluates with a padded
sampler and adds a special pass over the tail; here 50,000 images are 50,000 on any number of ranks. Its learning
rate falls by ten every 30 epochs; here too, as a function of the epoch alone, so resuming needs no memory of it.
cuDNN times its convolutions and picks the fastest (`benchmark`), unless `--seed` asks for a repeatable run.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch.nn import functional as F

import samestep
from samestep.recipes import common
from samestep.recipes.common import load_weights
from samestep.recipes.imagenet_options import parse, settle_files, world_arguments
from samestep.recipes.models import architecture
from samestep.recipes.progress import ProgressDisplay, percent, print_rank0

if TYPE_CHECKING:
    from samestep.recipes.images import DummyImages, ImageFolder

    Images: TypeAlias = ImageFolder | DummyImages

__all__ = ["learning_rate", "main"]

EPOCHS_PER_DECADE = 30
DEFAULT_SEED = 0  # without --seed a run is not deterministic, but its ranks still share one


def main(argv: Sequence[str] | None = None) -> int:
    """Train or evaluate; 0, or the exit code of an error told in one line."""
    args = parse(argv)
    start = start_ranks if args.multiprocessing_distributed else train
    return common.run_main("imagenet", functools.partial(start, args))


def start_ranks(args: argparse.Namespace) -> None:
    """One process for each GPU of this machine, or as many as asked for."""
    number = args.processes or (0 if args.no_accel else torch.cuda.device_count())
    if number == 0:
        raise samestep.UsageError("--multiprocessing-distributed starts a rank for each GPU; without: --processes N")
    args.gpu = None
    try:
        samestep.spawn(join_and_train, number, args, number, progress=False)  # rank 0 draws its own
    except samestep.RankFailure as failure:
        if failure.exit_code != 2:
            raise
        raise SystemExit(2) from None  # that rank has said in one line what to fix


def join_and_train(args: argparse.Namespace, number: int) -> None:
    """Runs in each of the `number` processes of one machine; `--rank` and `--world-size` count machines."""
    if args.world_size > 1:
        with samestep.world(device="cpu") as machine:
            args.rank = max(0, args.rank) * number + machine.rank
        args.world_size *= number
    else:
        args.rank = args.world_size = -1
        args.dist_url = None
    code = common.run_main("imagenet", functools.partial(train, args))
    if code:
        raise SystemExit(code)


class Training:
    """Network, optimizer and loader. Collective: every rank must make one."""

    def __init__(self, args: argparse.Namespace, world: samestep.World, train_set: Images, seed: int) -> None:
        network = architecture(args.arch, classes=len(train_set.classes), zero_init=args.zero_init)
        if args.pretrained is not None:
            load_weights(network, args.pretrained)
        network = network.to(world.device, common.dtype(args.precision))
        # the slices of virtual ranks are computed one after another, and have statistics of their own
        self.model = samestep.replicate(network, world, batchnorm=None if world.virtual is None else "local")
        settings = {"lr": args.lr, "momentum": args.momentum, "weight_decay": args.weight_decay}
        self.optimizer = torch.optim.SGD(self.model.parameters(), **settings)
        self.batches = samestep.shards(
            train_set,
            world,
            batch_size=args.batch_size,
            micro_batch_size=args.micro_batch_size,
            workers=args.workers,
            seed=seed,
        )
        self.precision = args.precision

    def scores(self, images: torch.Tensor) -> torch.Tensor:
        """The model's forward, in the precision asked for: B x classes."""
        with common.autocast(self.precision, images.device):
            return self.model(images.to(common.dtype(self.precision)))  # type: ignore[no-any-return]

    def steps(self, rate: float) -> Iterator[None]:
        """One pass over the training images at this learning rate; yields after each optimizer step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for images, labels in self.batches:
            losses = F.cross_entropy(common.at_least_float32(self.scores(images)), labels, reduction="none")
            self.batches.mean(losses).backward()  # type: ignore[no-untyped-call]
            if self.batches.step_ends:
                self.optimizer.step()
                self.optimizer.zero_grad()
                yield


def train(args: argparse.Namespace) -> None:
    """The training, its evaluations and its summary. Collective: every rank must call."""
    settle_files(args)
    train_set, val_set = datasets(args)
    repeatable = args.seed is not None
    seed = args.seed if repeatable else DEFAULT_SEED
    with samestep.world(**world_arguments(args), seed=seed, deterministic=repeatable) as world:
        torch.backends.cudnn.benchmark = not repeatable
        if args.seed is not None:
            note = "--seed asks for repeatable kernels; on a GPU they can be considerably slower"
            print_rank0("imagenet", world, note)
        if args.checkpoint is None and not args.evaluate:
            print_rank0("imagenet", world, "nothing is saved: --checkpoint DIR saves, and resumes from there")
        training = Training(args, world, train_set, seed)
        state = resumption(args, world, training)
        measure = functools.partial(top_1_and_5, training, val_set, world, args)
        display = ProgressDisplay(
            "imagenet",
            world,
            training.batches,
            epochs=0 if args.evaluate else args.epochs,
            items=len(train_set),
            unit="images",
            columns={"lr": lambda: f"{training.optimizer.param_groups[0]['lr']:g}"},
            print_freq=args.print_freq,
        )
        with display as show:
            shares = None
            for epoch in () if args.evaluate else state.epochs(args.epochs):
                show.begin(epoch)
                rate = learning_rate(args.lr, epoch)
                for _ in training.steps(rate):
                    state.commit()
                    show.step()
                shares = measure()
                show.result(top_1=percent(shares[0]), top_5=percent(shares[1]))
            top_1, top_5 = map(percent, shares or measure())  # or: nothing was left to train, or asked to be
            show.summary(f"top-1 {top_1}, top-5 {top_5} of {len(val_set):,} validation images", args.checkpoint)


def resumption(args: argparse.Namespace, world: samestep.World, training: Training) -> samestep.Checkpoint:
    """Where the training stands, and what saves it. Collective: every rank must call."""
    state = common.make_checkpoint(args, world, training.batches, model=training.model, optimizer=training.optimizer)
    if args.resume == args.checkpoint and args.resume is not None and not state.resumed:
        raise samestep.UsageError(f"there is no checkpoint in {args.resume}")
    if args.start_epoch and not state.resumed:
        state.epoch = args.start_epoch
        training.batches.epoch = args.start_epoch
    return state


def top_1_and_5(
    training: Training, val_set: Images, world: samestep.World, args: argparse.Namespace
) -> tuple[float, float]:
    """The shares of images whose class is the first, or among the first five, of the network's guesses.

    Each image counts once, whatever the number of ranks. Collective: every rank must call.
    """

    def hits(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = batch
        guesses = training.scores(images).topk(min(5, len(val_set.classes)), dim=1).indices
        right = guesses == labels.unsqueeze(1)
        return torch.stack([right[:, 0], right.any(1)], dim=1), labels

    measured = samestep.evaluate(
        hits,
        val_set,
        world,
        batch_size=args.batch_size,
        metrics={"shares": lambda right, _: right.double().mean(0).tolist()},
        workers=args.workers,
    )
    top_1, top_5 = measured["shares"]
    return top_1, top_5


def datasets(args: argparse.Namespace) -> tuple[Images, Images]:
    from samestep.recipes.images import DummyImages, train_and_val

    if args.dummy:
        number = args.dummy_images
        return DummyImages(number, size=args.image_size), DummyImages(-(-number // 25), size=args.image_size, seed=1)
    return train_and_val(args.data, size=args.image_size, seed=args.seed or DEFAULT_SEED)


def learning_rate(first: float, epoch: int) -> float:
    """A tenth of it after every 30 epochs.

    >>> [learning_rate(0.1, epoch) for epoch in (0, 29, 30)]
    [0.1, 0.1, 0.01]
    """
    return float(first / 10 ** (epoch // EPOCHS_PER_DECADE))


if __name__ == "__main__":
    raise SystemExit(main())
