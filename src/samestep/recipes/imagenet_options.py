"""The command line of PyTorch's official ImageNet example, and what each option means here.

Source: https://github.com/pytorch/examples/tree/main/imagenet. Differences, all of them on purpose:

    option                        official example                    here
    -j, --workers                 of a machine, divided               of each rank
    -b, --batch-size              of a machine                        of the whole step, over all ranks
    --resume PATH                 one pickled file                    a checkpoint directory, or a file of weights
    --pretrained                  downloads                           --pretrained FILE, a local file of weights
    -e, --evaluate                pads the last batch                 every image once
    --seed N                      deterministic, each rank alike      deterministic; one seed, its own streams per rank
    --world-size, --rank          machines, or processes              the same
    --multiprocessing-distributed one process for each GPU            the same; --processes N says another number
    nn.DataParallel without any   yes                                 no: one process, or several with their own GPU
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import samestep
from samestep.recipes.common import PRECISIONS, add_virtual_ranks, count, not_negative, parser, positive

__all__ = ["parse", "settle_files", "world_arguments"]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked against each other."""
    made = parser("imagenet", "Train a ResNet, or another network, on folders of images.")
    add_training(made)
    add_files(made)
    add_distributed(made)
    args = made.parse_args(argv)
    if args.processes is not None and not args.multiprocessing_distributed:
        made.error("--processes counts the ranks that --multiprocessing-distributed starts, and that is not given")
    return args


def settle_files(args: argparse.Namespace) -> None:
    """Reads `--resume` as what it names: a directory of checkpoints, or a file of weights."""
    if args.resume is None:
        return
    if args.resume.is_file():
        args.pretrained = args.resume
    elif not args.resume.is_dir():
        raise samestep.UsageError(f"nothing to resume at {args.resume}: no such file or directory")
    elif args.checkpoint not in {None, args.resume}:
        raise samestep.UsageError(f"--resume {args.resume} saves there too, so --checkpoint must not name another")
    else:
        args.checkpoint = args.resume


def add_training(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add("-a", "--arch", default="resnet18", metavar="ARCH", help="network, such as resnet18 or resnet50")
    add("-j", "--workers", type=count(0), default=4, metavar="N", help="loader processes, for each rank")
    add("--epochs", type=count(1), default=90, metavar="N", help="passes over the training images")
    add("--start-epoch", type=count(0), default=0, metavar="N", help="number of the first epoch")
    add("-b", "--batch-size", type=count(1), default=256, metavar="N", help="images a step, over all ranks")
    add("--micro-batch-size", type=count(1), default=None, metavar="N", help="images a forward, on one rank")
    add("--lr", "--learning-rate", type=positive, default=0.1, metavar="X", help="learning rate at the start")
    add("--momentum", type=not_negative, default=0.9, metavar="X", help="momentum of SGD")
    add(
        "--wd", "--weight-decay", dest="weight_decay", type=not_negative, default=1e-4, metavar="X", help="weight decay"
    )
    add("--zero-init", action="store_true", help="start residual branches at zero, for large batches")
    add("--precision", choices=sorted(PRECISIONS), default="float32", help="bf16 is mixed: weights stay float32")
    add("--seed", type=count(0), default=None, metavar="N", help="make the run repeatable, at a price in speed")
    add("--image-size", type=count(8), default=224, metavar="N", help="side of the square seen, in pixels")
    add_virtual_ranks(made)
    add("-p", "--print-freq", type=count(1), default=10, metavar="N", help="steps between lines, in a log")


def add_files(made: argparse.ArgumentParser) -> None:
    add = made.add_argument
    add("data", nargs="?", type=Path, default=Path("imagenet"), metavar="DIR", help="holds train/ and val/")
    add("--checkpoint", type=Path, default=None, metavar="DIR", help="save there, and resume from there")
    add("--save-every", default="10 min", metavar="TIME", help="how often to save: '10 min', '30 s', '500 steps'")
    add("--resume", type=Path, default=None, metavar="PATH", help="go on from this checkpoint; or a file of weights")
    add("--pretrained", type=Path, default=None, metavar="FILE", help="start from these weights (.pth, .safetensors)")
    add("-e", "--evaluate", action="store_true", help="measure on the validation images, without training")
    add("--dummy", action="store_true", help="synthetic images, for measuring speed")
    add("--dummy-images", type=count(1), default=1_281_167, metavar="N", help="how many of them")


def add_distributed(made: argparse.ArgumentParser) -> None:
    """Who takes part. Under a launcher none of these is needed."""
    add = made.add_argument
    add("--world-size", type=int, default=-1, metavar="N", help="number of ranks; -1: as the launcher says")
    add("--rank", type=int, default=-1, metavar="N", help="number of this rank; -1: as the launcher says")
    add("--dist-url", default=None, metavar="URL", help="where ranks meet: tcp://host:port, file:///path, env://")
    add("--dist-backend", default=None, metavar="NAME", help="gloo or nccl, instead of the rule's choice")
    add("--gpu", type=count(0), default=None, metavar="N", help="train on this GPU")
    add("--no-accel", action="store_true", help="train on the CPU")
    starts = "start one rank for each GPU of this machine; --world-size and --rank then count machines"
    add("--multiprocessing-distributed", action="store_true", help=starts)
    add("--processes", type=count(1), default=None, metavar="N", help="ranks to start, instead of one for each GPU")


def world_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What :func:`samestep.world` has to know of the options."""
    device = "cpu" if args.no_accel else None if args.gpu is None else f"cuda:{args.gpu}"
    if args.world_size > 1 and args.dist_url is None:
        raise samestep.UsageError(f"--world-size {args.world_size} needs --dist-url, such as tcp://host:23456")
    return {
        "backend": args.dist_backend,
        "init_method": args.dist_url,
        "rank": None if args.rank < 0 else args.rank,
        "size": None if args.world_size < 0 else args.world_size,
        "device": device,
        "virtual_ranks": args.virtual_ranks,
    }
