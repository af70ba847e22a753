"""A small GPT that learns to write Python, from the bytes of Python's own standard library.

    python -m samestep.recipes.text
    samestep run -n 2 -m samestep.recipes.text --precision bf16
    torchrun --nproc-per-node 2 -m samestep.recipes.text --checkpoint runs/text

The tail of each file is padded and masked, so ranks hold different numbers of real bytes. A loss averaged on each
rank and then over ranks would weigh the bytes of a short rank more; `weight=unmasked` and `batches.mean` make the
step's loss the mean over its unmasked bytes, whichever rank holds them. Held-out bits per byte are exact: the sum
over every byte of every held-out file, once, divided by their number.

The model is the decoder of Radford et al. 2019, in as many lines as it needs: pre-norm blocks, learned positions,
`scaled_dot_product_attention` with its causal mask, and a head that shares its weights with the token embedding (Press
and Wolf, arXiv:1608.05859). No dropout: one pass over the text does not overfit, and random masks would have to differ
from rank to rank.

    symbols B x T  ->  embedding + position  B x T x width  ->  blocks  ->  scores B x T x symbols
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.recipes import common, corpus
from samestep.recipes.common import cosine
from samestep.recipes.progress import ProgressDisplay

__all__ = ["GPT", "main"]

PROMPT = b"def "
SPREAD = 0.02  # standard deviation of fresh weights


class Attention(nn.Module):
    """Causal self-attention with `heads` heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each B x heads x T x width/heads
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then a two-layer perceptron four times as wide, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Symbols `B x T` (int64, T <= context) to scores `B x T x symbols` of the symbol that follows; B may be 0."""

    def __init__(self, symbols: int, *, context: int, layers: int, heads: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(symbols, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.context = context
        self.initialise(layers)

    def initialise(self, layers: int) -> None:
        """Small normal weights; those that add to the residual stream smaller still, the deeper the network."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            residual = name.endswith(("out.weight", "mlp.2.weight"))
            nn.init.normal_(parameter, std=SPREAD / math.sqrt(2 * layers) if residual else SPREAD)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Scores, not yet probabilities."""
        places = torch.arange(symbols.shape[1], device=symbols.device)
        x = self.blocks(self.embedding(symbols) + self.position(places))
        return F.linear(self.norm(x), self.embedding.weight)

    @torch.no_grad()
    def continued(self, prompt: list[int], length: int, generator: torch.Generator) -> list[int]:
        """`length` symbols drawn one after another to follow `prompt`."""
        drawn = list(prompt)
        for _ in range(length):
            recent = torch.tensor([drawn[-self.context :]], device=self.embedding.weight.device)
            chances = self(recent)[0, -1].float().softmax(-1).cpu()
            drawn.append(int(torch.multinomial(chances, 1, generator=generator)))
        return drawn[len(prompt) :]


def main(argv: Sequence[str] | None = None) -> int:
    """Train; 0, or the exit code of an error told in one line."""
    args = parser().parse_args(argv)
    return common.run_main("text", lambda: train(args))


def parser() -> argparse.ArgumentParser:
    made = common.parser("text", "Train a small GPT over the bytes of Python's standard library.")
    common.add_training_options(made, epochs=1, batch_size=32, lr=3e-3)
    add = made.add_argument
    add("--data", type=Path, default=None, metavar="DIR", help="folder of *.py files, instead of the library's")
    add("--bytes", type=common.count(1), default=1_500_000, metavar="N", help="how much text to read")
    add("--context", type=common.count(1), default=128, metavar="N", help="bytes in a sequence")
    add("--layers", type=common.count(1), default=4, metavar="N", help="blocks")
    add("--heads", type=common.count(1), default=4, metavar="N", help="attention heads in a block")
    add("--width", type=common.count(1), default=128, metavar="N", help="width of the residual stream")
    add("--warm-up", type=common.count(0), default=40, metavar="N", help="steps until the highest learning rate")
    add("--clip", type=common.positive, default=1.0, metavar="X", help="largest norm of the whole gradient")
    add("--sample", type=common.count(0), default=160, metavar="N", help="bytes to write at the end")
    return made


class Training:
    """Model, optimizer, schedule and loader. Collective: every rank must make one."""

    def __init__(self, args: argparse.Namespace, world: samestep.World, train_set: corpus.ByteSequences) -> None:
        network = GPT(corpus.SYMBOLS, context=args.context, layers=args.layers, heads=args.heads, width=args.width)
        network.to(world.device, common.dtype(args.precision))
        self.model = samestep.replicate(network, world, compress=args.compress)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self.batches = samestep.shards(
            train_set,
            world,
            batch_size=args.batch_size,
            micro_batch_size=args.micro_batch_size,
            weight=corpus.unmasked,
            workers=args.workers,
            seed=args.seed,
        )
        self.schedule = cosine(self.optimizer, args.epochs * self.batches.steps_per_epoch, warm_up=args.warm_up)
        self.precision, self.clip = args.precision, args.clip

    def losses(self, batch: corpus.Sample) -> torch.Tensor:
        """The loss of each byte in nats, B x T; 0 where the target is padding."""
        inputs, targets = batch
        with common.autocast(self.precision, inputs.device):
            scores = self.model(inputs)
        scores = common.at_least_float32(scores)
        return F.cross_entropy(scores.transpose(1, 2), targets, ignore_index=corpus.IGNORED, reduction="none")

    def steps(self) -> Iterator[None]:
        """One pass over the training bytes; yields after each optimizer step."""
        for inputs, targets in self.batches:
            loss = self.batches.mean(self.losses((inputs, targets)), mask=targets != corpus.IGNORED)
            loss.backward()  # type: ignore[no-untyped-call]
            if self.batches.step_ends:
                samestep.clip_grad_norm_(self.model, self.clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.schedule.step()
                yield


def train(args: argparse.Namespace) -> None:
    """The training, its evaluation and its summary. Collective: every rank must call."""
    if args.width % args.heads:
        raise samestep.UsageError(f"--width {args.width} cannot be divided among --heads {args.heads}")
    folder = args.data or corpus.standard_library()
    train_set, held_out = corpus.train_and_held_out(folder, total=args.bytes, context=args.context)
    with samestep.world(
        backend=args.backend, device=args.device, seed=args.seed, virtual_ranks=args.virtual_ranks
    ) as world:
        training = Training(args, world, train_set)
        batches = training.batches
        state = common.make_checkpoint(
            args, world, batches, model=training.model, optimizer=training.optimizer, schedule=training.schedule
        )
        columns = {"bits per byte": lambda: f"{float(batches.loss) / math.log(2):.3f}"}
        with ProgressDisplay(
            "text", world, batches, epochs=args.epochs, items=train_set.bytes, unit="tokens", columns=columns
        ) as show:
            show.note(f"{train_set.bytes:,} bytes of {folder} to train on, {held_out.bytes:,} held out")
            bits = None
            for epoch in state.epochs(args.epochs):
                show.begin(epoch)
                for _ in training.steps():
                    state.commit()
                    show.step()
                bits = bits_per_byte(training, held_out, world, args.batch_size)
                show.result(held_out_bits_per_byte=f"{bits:.3f}")
            if bits is None:  # the checkpoint held a finished training
                bits = bits_per_byte(training, held_out, world, args.batch_size)
            if world.is_first and args.sample:
                show.note(f"it writes {written(cast('GPT', training.model.module), args.sample, args.seed)}")
            show.summary(f"{bits:.3f} bits per byte over {held_out.bytes:,} held-out bytes", args.checkpoint)


def bits_per_byte(training: Training, held_out: corpus.ByteSequences, world: samestep.World, batch_size: int) -> float:
    """Exact: nats summed over every held-out byte, divided by their number. Collective: every rank must call."""

    def sums_and_counts(batch: corpus.Sample) -> tuple[torch.Tensor, torch.Tensor]:
        return training.losses(batch).double().sum(1), (batch[1] != corpus.IGNORED).sum(1)

    metrics = {"bits": lambda sums, counts: float(sums.sum() / counts.sum()) / math.log(2)}
    return float(samestep.evaluate(sums_and_counts, held_out, world, batch_size=batch_size, metrics=metrics)["bits"])


def written(model: GPT, length: int, seed: int) -> str:
    """What the model writes after `def `, as one printable line. Not collective: the bare module, on one rank."""
    model.eval()
    drawn = model.continued(list(PROMPT), length, torch.Generator().manual_seed(seed))
    text = bytes(symbol for symbol in [*PROMPT, *drawn] if symbol < corpus.START)
    return repr(text.decode(errors="replace"))


if __name__ == "__main__":
    raise SystemExit(main())
