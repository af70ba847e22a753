"""`samestep plan`: what a training would take on other machines, before anybody rents them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.cli.checks import check_outputs, check_program, warn_of_others
from samestep.cli.options import Parser, whole
from samestep.errors import UsageError
from samestep.files import write_atomic
from samestep.launch.output.console import say

if TYPE_CHECKING:
    from samestep.network.cluster import Cluster
    from samestep.planning.plan import TrainingPlan
    from samestep.planning.profile import Profile

DESCRIPTION = """Predicts what a step of a training takes on 1, 2, 4, … processes of a cluster: data parallel, as a
pipeline, or both; which all-reduce and which buckets are fastest there, what limits it, what to change next.

The script is profiled on this machine: it runs in one process for some steps, unchanged, and is then stopped.
A cluster file says what stands where and what lies between (`samestep bench links --write FILE` measures one);
without it the plan is for the cores or GPUs of this machine, whose links are measured."""

EXAMPLES = """examples:
  samestep plan train.py --lr 0.1                        this machine, with the script's own options
  samestep plan --cluster cluster.toml train.py          that cluster
  samestep plan --save-profile mine.json train.py        keep the profile, to plan with it again
  samestep plan --profile mine.json --cluster big.toml   plan where the script cannot run
  samestep plan --profile mine.json --cluster big.toml --scale-batch     every process keeps its batch
  samestep plan --cluster cluster.toml --apply chosen.toml train.py
  samestep run --settings chosen.toml train.py           start it so
  samestep plan --profile mine.json --cluster big.toml --picture plan.html --json plan.json

exit code: 0, whatever the plan says; 1 where nothing fits; 2 for a usage error."""


FILES = ("--cluster", "--save-profile", "--apply", "--picture")


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse(arguments)
    _check(options)
    cluster = _cluster(options)
    profile = _profile(options)
    if options.save_profile is not None:
        profile.save(options.save_profile)
        print(f"the profile is in {options.save_profile}", file=sys.stderr)
    from samestep.planning.plan import make_plan

    scale_batch = profile.per_rank if options.scale_batch is None else options.scale_batch
    if profile.per_rank and options.scale_batch is None:
        text = f"each process keeps its batch of {profile.batch}, as DistributedSampler has it (or --no-scale-batch)"
        print(text, file=sys.stderr)
    found = make_plan(profile, cluster, options.ranks or cluster.ranks, scale_batch=scale_batch)
    _write(options, found)
    for line in found.lines():
        print(line)
    if options.apply is not None:
        print(_started(found, options.apply))
    return 0 if found.best is not None else 1


def _started(found: TrainingPlan, settings: Path) -> str:
    """What the settings start: a pipeline is the script's own to make."""
    from samestep.text import seconds_text

    step, best = found.as_it_is, found.best
    if step is None or best is None:
        return f"{settings} sets nothing: as it is the script fits nowhere, and stages take samestep.pipeline in it"
    command = f"samestep run --settings {settings}{_hosts(step.layout.ranks, found.cluster.devices)} …"
    if step.layout == best.layout:
        return f"{command} starts it so"
    return (
        f"{command} starts {step.layout}, {seconds_text(step.seconds)} a step: {best.layout} take samestep.pipeline in "
        "the script"
    )


def _hosts(ranks: int, devices: int) -> str:
    """The option for so many ranks, if they take several hosts; with slots where the last host has fewer."""
    if ranks <= devices:
        return ""
    return f" --hosts …:{devices},…:{ranks % devices}" if ranks % devices else " --hosts …"


def _parser() -> Parser:
    parser = Parser(
        "plan",
        usage="samestep plan [options] (script.py | -m module | --profile FILE) [args…]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("--profile", metavar="FILE", type=Path, help="of a training, instead of a script")
    add("--cluster", metavar="FILE.toml", type=Path, help="the machines to plan for (default: this one)")
    add(
        "--ranks",
        metavar="N",
        type=whole("number of processes", 1),
        help="processes at most (default: all that the cluster has)",
    )
    add(
        "--steps",
        metavar="K",
        type=whole("number of steps", 3, ": their median is taken"),
        default=10,
        help="steps of the script that are timed (default: 10)",
    )
    add(
        "--scale-batch",
        action=argparse.BooleanOptionalAction,
        help="every process takes as many samples as the profiled one: a larger batch, another training (default: "
        "where the script deals its data out by DistributedSampler, and its batch is one process's)",
    )
    add("--save-profile", metavar="FILE", type=Path, help="keep the profile")
    add("--apply", metavar="FILE.toml", type=Path, help="write settings for `samestep run --settings`")
    add("--picture", metavar="FILE.html", type=Path, help="draw it, in a page that needs no network")
    add("--json", metavar="FILE", type=Path, help="write every number to this file")
    add("-m", dest="module", action="store_true", help="what follows is a module's name, as with python -m")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _check(options: argparse.Namespace) -> None:
    if options.profile is None and not options.program:
        raise UsageError("no script is given: `samestep plan train.py`, or `--profile FILE` of one that was measured")
    if options.profile is not None and options.program:
        raise UsageError(f"--profile {options.profile} and {options.program[0]} are both given: leave one of them out")
    if options.program:
        check_program(options.program[0], is_module=options.module)
        _tell_misplaced(options.program)
    check_outputs(options, "save_profile", "apply", "picture", "json")
    if options.picture is not None:
        from samestep.reporting.page import check_library

        check_library()


def _tell_misplaced(program: Sequence[str]) -> None:
    """Says of options that only `plan` is likely to have that they went to the script: they stand behind it."""
    script, *arguments = program
    misplaced = [word for word in arguments if word.partition("=")[0] in FILES]
    if misplaced:
        say(
            f"note: {misplaced[0]} comes after {script} and is passed to it; options of plan come first: "
            f"samestep plan {misplaced[0]} … {script}"
        )


def _cluster(options: argparse.Namespace) -> Cluster:
    from samestep.network.cluster import load
    from samestep.planning import measure_cluster

    if options.cluster is None or options.program:
        warn_of_others()
    if options.cluster is None and sys.stderr.isatty():
        say("measuring the links of this machine")
    found = measure_cluster.local_cluster() if options.cluster is None else load(options.cluster)
    if options.ranks is not None and options.ranks > found.ranks:
        raise UsageError(f"--ranks {options.ranks} are asked for, and the cluster has {found.ranks}: give 1 to that")
    return found


def _profile(options: argparse.Namespace) -> Profile:
    from samestep.planning import measure_cluster
    from samestep.planning.profile import load
    from samestep.planning.profile_script import profile_script

    if options.profile is not None:
        return load(options.profile)
    program, *arguments = options.program
    threads = measure_cluster.threads() if options.cluster is None else None  # ranks of this machine share its cores
    return profile_script(program, arguments, steps=options.steps, is_module=options.module, threads=threads)


def _write(options: argparse.Namespace, found: TrainingPlan) -> None:
    if options.json is not None:
        write_atomic(options.json, [json.dumps(found.as_json(), indent=2, allow_nan=False), "\n"])
    if options.picture is not None:
        from samestep.planning.plan import draw

        draw(found, options.picture)
    if options.apply is not None:
        write_atomic(options.apply, [found.settings().dumps(found.title(found.as_it_is))])
