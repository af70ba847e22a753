"""Whether compressing gradients pays on this network: a step with each codec, beside the step without.

All train the same network of 6.3 million parameters (six linear layers of 1024 x 1024, 16 rows a rank, which compute
little for 25 MB of gradients) in the same processes, a step each in turn. Beside the time it is told what a rank sends,
what encoding and decoding take by themselves, and on which links it therefore pays: bytes that are saved, over that
time. Compression has lost in all but 6 of 200 settings of a data centre (S. Agarwal et al., "On the Utility of Gradient
Compression in Distributed Training Systems", MLSys 2022), so it is never on by itself.

On one host its processes talk through the loopback device, if not through memory, and nothing is to be gained. To
measure a network, start it on its hosts:

    samestep run --hosts node1,node2 -n 1 -m samestep bench compress
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

import samestep
from samestep.bench.harness import FEWEST, Comparison, Options, Report, training_device
from samestep.bench.step import setting, steps_of, time_loops
from samestep.bench.workloads import WIDE
from samestep.compress.chunks import MAX_CHUNK, chunks_of, pieces_of
from samestep.compress.codecs import Codec, RowCodec
from samestep.compress.compressed_mean import AllToAll, ReductionContext, mean
from samestep.compress.error_feedback import ErrorFeedback
from samestep.errors import UsageError
from samestep.launch.functions.spawn import spawn
from samestep.rankenv import read_rank_variables
from samestep.replicas.replicate import Replica
from samestep.runtime.exchange import all_gather_json
from samestep.runtime.world import World

CODECS = ("fp16", "bf16", "int8", "sign", "topk", "powersgd")
AS_IT_COMES = "as it comes"
ROWS = ("sent_mb", "coding_ms", "pays_below_mbit")
LEGEND = (
    "ours: with this codec, or as samestep reduces without one; theirs: without, over the backend; speedup: theirs "
    "over ours; coding: to encode and decode, by itself; pays below: on links of fewer Mbit/s, by bytes and coding "
    "alone."
)


def run(options: Options) -> Report:
    """Measures among the ranks that have been started, or else starts some here; returns the report."""
    started = read_rank_variables()
    if max(options.ranks, 0 if started is None else started.size) < 2:
        raise UsageError("compression needs 2 ranks or more: samestep bench compress -n 2")
    if started is not None and started.size > 1:
        comparisons, conditions = measure(None, options.repeats)
    else:
        device = training_device(options.ranks)
        comparisons, conditions = spawn(measure, options.ranks, device, options.repeats, progress=False)[0]
    text = conclusion(comparisons, hosts=conditions["hosts"])
    return Report("compress", comparisons, conditions, ROWS, conclusion=text, legend=LEGEND)


def conclusion(comparisons: list[Comparison], hosts: int) -> str:
    """Says whether compression pays here: whether a codec is surely faster than the best way without."""
    if not all(one.is_enough for one in comparisons):
        return f"Too few steps to tell whether compression pays: --repeats {FEWEST} or more."
    where = "on this network" if hosts > 1 else "among processes of one host"
    without = min([1.0, *(one.ratio for one in comparisons if one.name == AS_IT_COMES)])
    codecs = [one for one in comparisons if one.name != AS_IT_COMES]
    paying = sorted((one for one in codecs if one.interval[1] < without), key=lambda one: one.ratio)
    if not paying:
        other = "" if hosts > 1 else " Between hosts it may: samestep run --hosts A,B -n 1 -m samestep bench compress"
        return f"Nothing is gained by compression {where}: leave compress out.{other}"
    text = ", ".join(f"{one.name} {without / one.ratio:.1f} times" for one in paying)
    return f"Compression pays {where}: a step is {text} as quick as without. Whether it trains as well, try."


def measure(device: str | None, repeats: int) -> tuple[list[Comparison], dict[str, Any]]:
    """Runs on every rank; returns a comparison of each way with no compression over the backend, and the conditions.

    Collective.
    """
    with samestep.world(device=device) as world:
        ways = {codec: _replica(world, codec) for codec in CODECS}
        ways |= {"backend": _replica(world, None, "gloo"), AS_IT_COMES: _replica(world, None)}
        loops = [steps_of(WIDE, model, world) for model in ways.values()]
        times = dict(zip(ways, time_loops(loops, world, repeats, steps=1), strict=True))
        plain = 2 * (world.size - 1) / world.size * sum(p.nbytes for p in ways["backend"].module.parameters())
        found = []
        for name in (*CODECS, AS_IT_COMES):
            figures = dict.fromkeys(ROWS, 0.0)
            if (one := ways[name].compression) is not None:
                sent, coding = one.sent / one.steps, coding_time(one.codec, world)  # bytes and seconds a step
                figures = dict(zip(ROWS, (sent / 1e6, 1e3 * coding, 8 * (plain - sent) / coding / 1e6), strict=True))
            found.append(Comparison(name, "step", times[name], times["backend"], figures=figures))
        hosts = len(set(all_gather_json(world.data, world.host_index)))
        return found, setting(world, WIDE) | {"steps_per_block": 1, "hosts": hosts}


def _replica(world: World, codec: str | None, reduce: Any = None) -> Replica:
    return samestep.replicate(WIDE.network().to(world.device), world, compress=codec, reduce=reduce)


def coding_time(codec: Codec, world: World) -> float:
    """Returns the seconds that a rank takes to encode and decode a step's gradients. Not collective.

    Every message is answered by itself, as if all ranks had said the same.
    """
    memory, seconds = ErrorFeedback(world.device), []
    named = [(name, each.shape) for name, each in WIDE.network().named_parameters() if codec.takes(each.shape)]
    pieces = [
        piece
        for number, (name, shape) in enumerate(named)
        for piece in pieces_of(name, shape, number, most=MAX_CHUNK if codec.cuts else None)
    ]
    chunks = chunks_of(pieces, codec.block if isinstance(codec, RowCodec) else 1)
    flats = [torch.randn(chunk.length, device=world.device) for chunk in chunks]
    for step in range(4):  # the first takes memory
        begin = time.perf_counter()
        for chunk, flat in zip(chunks, flats, strict=True):
            _answered(mean(codec, ReductionContext(chunk, world.rank, world.size, step, 0, memory), flat), world)
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])


def _answered(scheme: Iterator[Any], world: World) -> None:
    message = next(scheme)
    while True:
        packets = message.packets
        if isinstance(message, AllToAll):
            packets = packets[: message.counts[world.rank]]
        try:
            message = scheme.send(torch.stack([packets] * world.size))  # type: ignore[attr-defined]
        except StopIteration:
            return
