"""Floor 6: what samestep costs, or saves, beside the code it stands in for.

Every benchmark is one file with `run(options) -> Report` and one line in the table below; `harness` times it. A
benchmark compares two blocks of work in the same processes and the same run, because two runs on a shared machine
differ by more than what is to be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

from samestep.bench.harness import Options, Report
from samestep.errors import UsageError


class Benchmark(NamedTuple):
    summary: str  # what the help says of it
    repeats: int  # how many pairs it takes
    joins: bool = False  # whether it measures among ranks that have been started; the others start their own
    module: str = ""  # with `run(options: Options) -> Report`; where empty, the one of its name here


BENCHMARKS = {
    "allreduce": Benchmark("an all-reduce in shared memory against gloo, 4 B to 256 MiB", 20),
    "buckets": Benchmark("a step with buckets chosen by measurement, beside the default", 120),
    "checkpoint": Benchmark("what a save costs the training, beside torch.save", 8),
    "compress": Benchmark("a step with compressed gradients: does it pay here", 10, joins=True),
    "guard": Benchmark("a training step with the guard of the replicas, and without", 60),
    "launch": Benchmark("the time to the first all-reduce against torchrun", 10),
    "links": Benchmark(
        "latency and bandwidth between the ranks, as a cluster file", 5, True, "samestep.planning.measure_cluster"
    ),
    "mpi": Benchmark("all-reduces and a step over MPI, beside gloo and shared memory", 20),
    "observe": Benchmark("a training step under verify's recorder, and under --check", 60),
    "pipeline": Benchmark("a pipeline's step beside its prediction, and beside torch's own schedule", 20),
    "step": Benchmark("a training step against a hand-written DistributedDataParallel loop", 150),
    "virtual": Benchmark("a training step on virtual ranks against one without them", 100),
}


def benchmark(name: str) -> Benchmark:
    if name not in BENCHMARKS:
        raise UsageError(f"there is no benchmark {name!r}: choose one of {', '.join(BENCHMARKS)}")
    return BENCHMARKS[name]


def load(name: str) -> Callable[[Options], Report]:
    run: Callable[[Options], Report] = import_module(benchmark(name).module or f"samestep.bench.{name}").run
    return run
