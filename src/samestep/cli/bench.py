"""`samestep bench`: samestep beside the code it stands in for, timed in alternating pairs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from samestep.bench import BENCHMARKS, benchmark, load
from samestep.bench.harness import Comparison, Options, Report, check_plot, draw
from samestep.cli.checks import check_outputs, warn_of_others, write_json
from samestep.cli.options import Parser, whole
from samestep.errors import UsageError
from samestep.files import write_atomic
from samestep.rankenv import read_rank_variables

if TYPE_CHECKING:
    from rich.table import Table

DESCRIPTION = """Times samestep against the code it stands in for, side by side in the same processes.

Blocks of both are timed in pairs, and which goes first changes with every pair, so a machine that speeds up or
slows down favours neither. The answer is the median ratio, with the interval that it can be trusted to lie in.

benchmarks:
{benchmarks}"""

EXAMPLES = """examples:
  samestep bench allreduce -n 4           four processes, every size: a minute
  samestep bench buckets                  bucket sizes that were chosen, against the default: four minutes
  samestep bench compress                 every codec beside a step without: half a minute
  samestep run --hosts node1,node2 -n 1 -m samestep bench compress
                                          the same between these hosts
  samestep bench guard                    two processes, 60 pairs of 16 steps: a minute and a half
  samestep bench launch -n 4              four processes, 10 pairs: two minutes
  samestep bench checkpoint               two processes, 8 pairs: two minutes
  samestep bench links --write cluster.toml        what lies between ranks, for `samestep plan`: ten seconds
  samestep bench mpi                      under mpiexec, on an idle and on a busy machine: two minutes
  samestep bench observe                  two processes, 60 pairs each: five minutes
  samestep bench pipeline                 two stages, 20 pairs each: a minute
  samestep bench step                     two processes, 150 pairs each: two minutes
  samestep bench step -n 4 --repeats 500  four processes, surer
  samestep bench step --json step.json    every single time, for plots

exit code: 0 whatever was measured; 2 for a usage error."""


MUCH_FASTER = 2 / 3  # a ratio below which percents say less than a factor


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse(arguments)
    chosen = benchmark(options.name)
    if options.plot is not None:
        check_plot(options.name)
    if options.write is not None and options.name != "links":
        raise UsageError(f"--write keeps the cluster file of `samestep bench links`, and this is {options.name}")
    check_outputs(options, "json", "write", "plot")
    started = read_rank_variables()
    if started is not None and started.size > 1 and not chosen.joins:
        raise UsageError(
            f"bench {options.name} starts ranks of its own, and {started.size} of it would disturb each other: "
            f"samestep bench {options.name} -n {started.size}, without a launcher"
        )
    if started is None:  # ranks that start together keep each other's cores busy
        warn_of_others()
    report = load(options.name)(Options(options.ranks, chosen.repeats if options.repeats is None else options.repeats))
    if started is not None and started.rank > 0:  # the first of ranks that measure together speaks for all
        return 0
    _show(report)
    if options.write is not None:
        _write(options.write, report.file)
    if options.plot is not None:
        draw(report, options.plot)
    return write_json(options.json, report.as_json())


def _write(file: Path, text: str) -> None:
    write_atomic(file, [text])
    print(f"{file} is written: samestep plan --cluster {shlex.quote(str(file))} train.py")


def _parser() -> Parser:
    width = max(map(len, BENCHMARKS))
    rows = "\n".join(f"  {name:<{width}}  {entry.summary}" for name, entry in BENCHMARKS.items())
    defaults = ", ".join(f"{name} {entry.repeats}" for name, entry in BENCHMARKS.items())
    parser = Parser(
        "bench",
        usage="samestep bench NAME [options]",
        description=DESCRIPTION.format(benchmarks=rows),
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("name", metavar="NAME", help="which benchmark; listed above")
    add(
        "-n",
        dest="ranks",
        metavar="N",
        type=whole("number of processes", 1),
        default=Options.ranks,
        help="processes (default: %(default)s)",
    )
    add("--repeats", metavar="K", type=whole("number of pairs", 2), help=f"pairs of blocks (default: {defaults})")
    add("--json", metavar="FILE", type=Path, help="write the medians, the ratio and every time to this file")
    add("--write", metavar="FILE.toml", type=Path, help="keep what links are like as a cluster file (links)")
    add("--plot", metavar="FILE.html", type=Path, help="draw bandwidth against size (allreduce; needs plotly)")
    return parser


def _show(report: Report) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    console.print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in report.setting.items()))
    if not report.comparisons:
        console.print(report.conclusion)
        return
    if report.rows:
        console.print(_rows(report))
        console.print(report.legend, end="\n\n" if report.legend else "")
        console.print(report.conclusion or _of_targets(report))
        return
    for comparison in report.comparisons:
        console.print(_table(comparison))
        console.print(_conclusion(comparison))
        if comparison.figures:
            console.print(", ".join(f"{_spaced(name)} {value:.2f}" for name, value in comparison.figures.items()))


def _table(comparison: Comparison) -> Table:
    from rich.table import Table

    table = Table(title=f"{comparison.name}, {len(comparison.ours)} pairs", title_justify="left")
    for heading in ("", f"ms per {comparison.unit}", "fastest", "slowest"):
        table.add_column(heading, justify="right" if heading else "left")
    for side, times in (("ours", comparison.ours), ("theirs", comparison.theirs)):
        table.add_row(side, *(f"{1000 * seconds:.2f}" for seconds in (median(times), min(times), max(times))))
    return table


def _rows(report: Report) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("", "ours ms", "theirs ms", "speedup", *map(_spaced, report.rows)):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for comparison in report.comparisons:
        times = (f"{1000 * median(side):.3f}" for side in (comparison.ours, comparison.theirs))
        figures = (f"{comparison.figures[name]:.2f}" for name in report.rows)
        table.add_row(comparison.name, *times, f"{1 / comparison.ratio:.1f} x", *figures)
    return table


def _spaced(name: str) -> str:
    return name.replace("_per_", "/").replace("_", " ")


def _of_targets(report: Report) -> str:
    held = [one for one in report.comparisons if one.most is not None]
    verdicts = {verdict: [one.name for one in held if one.kept is verdict] for verdict in (False, None)}
    missed = f"Missed: {'; '.join(verdicts[False])}. " if verdicts[False] else ""
    open_ = f"Inconclusive, take more --repeats: {'; '.join(verdicts[None])}." if verdicts[None] else ""
    return missed + open_ or "All targets are met."


def _conclusion(comparison: Comparison) -> str:
    lower, upper = (_percent(ratio) for ratio in comparison.interval)
    text = f"overhead {_percent(comparison.ratio)}, 95 % interval {lower} to {upper}"
    if comparison.ratio < MUCH_FASTER or (comparison.most is not None and comparison.most < 1):
        best, worst = (1 / ratio for ratio in comparison.interval)
        text = f"{1 / comparison.ratio:.2f} times as fast, 95 % interval {worst:.2f} to {best:.2f}"
    if comparison.most is None:
        return text
    target = f"at most {_percent(comparison.most)}" if comparison.most > 1 else "no slower"
    target = f"at least {1 / comparison.most:.3g} times" if comparison.most < 1 else target
    verdict = {True: "met", False: "missed", None: "inconclusive, take more --repeats"}[comparison.kept]
    return f"{text}; target: {target}: {verdict}"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"
