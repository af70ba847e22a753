"""`samestep run`: a script, unchanged, on N processes of this machine."""

from __future__ import annotations

import argparse
import json
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from samestep.cli.hosts import add_options, opened, own_ranks, place
from samestep.cli.options import Parser
from samestep.errors import UsageError
from samestep.launch.agent import Agent
from samestep.launch.cluster import Part
from samestep.launch.cores import binding_warning, describe, read_cores, read_unbound
from samestep.launch.devices import visible_gpus
from samestep.launch.gather import PATIENCE, Call, Sibling, follow
from samestep.launch.run import Plan, launch, part_here, summary
from samestep.launch.slurm import LEAVING, Batch, batch_script, submit
from samestep.launch.supervise import SAVING
from samestep.paths import RunDirectory, default_run_path
from samestep.rankenv import variable

__all__ = ["main"]

DESCRIPTION = """Starts a script on N processes (ranks) of this machine, or of several, and waits for them.

Every rank sees the variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, …), so a script
written for it runs unchanged. Each rank's output is shown live and kept in the run directory. When a rank
fails the others are stopped, and the last lines name the culprit, its own line, and where the logs lie."""

START = """how ranks start: fork copies one process that has imported torch (several times faster), spawn takes fresh
interpreters; auto forks when there are several ranks and the script does not forbid it"""

EXAMPLES = """options stand before the script; everything after it is the script's.

examples:
  samestep run -n 2 train.py --lr 0.1        two processes
  samestep run train.py                      one process per GPU; one where there is none
  samestep run -n 4 -m package.train --lr 1  a module, as with python -m
  samestep run -n 2 --restarts 3 train.py    start again after a failure, from the last checkpoint
  samestep run --hosts node[1-3] -n 4 train.py           over ssh; --dry-run shows the commands
  samestep run --slurm --nnodes 2 -n 4 train.py          queue it; --dry-run shows the batch script
  srun -N2 -n8 samestep run train.py                     a rank for each task; the same under mpiexec
  samestep run --nnodes 2 --node-rank 0 --rendezvous node1:29500 train.py      by hand, once on each host

torchrun's spellings are accepted: --nproc-per-node, --max-restarts, --master-addr, --master-port, with
underscores too.

exit code: 0; else the culprit's own; 128 + signal if a signal ended it; 1 for a rank that exited early with
code 0 while others waited for it; 75 when it was asked to make room and has saved; 2 for a usage error."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    options = _parser().parse(arguments)
    _check(options)
    if options.slurm:
        return _queue(options)
    if options.dry_run:
        _show(options)
        return 0
    where = place(options)
    if isinstance(where, Sibling) and where.index > 0:
        return _serve(follow(where, own_ranks(options, where)))
    with opened(options, where) as (head, parts, replacement):
        plan = _plan(options, parts)
        _announce(plan)
        verdict = launch(plan, head, replacement)
    if options.json is not None:
        options.json.write_text(json.dumps(summary(plan, verdict), indent=2) + "\n", encoding="utf-8")
    return verdict.exit_code


def _queue(options: argparse.Namespace) -> int:
    """Prints the batch script, or hands it to Slurm."""
    program = options.program[0]
    path = default_run_path(program) if options.run_dir is None else options.run_dir.absolute()
    run = [] if options.start == "auto" else ["--start", options.start]
    run += [] if options.local_rank is None else [f"--pass{options.local_rank[1:]}"]
    run += [] if options.lost_host == "stop" else ["--lost-host", options.lost_host]
    run += [] if options.join_timeout == PATIENCE else ["--join-timeout", f"{options.join_timeout:g}"]
    run += [] if options.json is None else ["--json", str(options.json)]
    run += [] if options.interface is None else ["--interface", options.interface]
    script = batch_script(
        Batch(
            program=(*(["-m"] if options.module else []), *options.program),
            directory=Path.cwd(),
            run_dir=path,
            options=(*run, *(["--pin"] if options.pin else [])),
            nodes=options.nnodes or 1,
            ranks=options.ranks,
            more=(options.sbatch_args,) if options.sbatch_args else (),
            restarts=options.restarts,
            wait=LEAVING if options.lost_host == "stop" else 0,
        )
    )
    if options.dry_run:
        print(script, end="")
    else:
        print(f"job {submit(script, path)} is queued; its output comes to {path}/slurm-<job>.out")
    return 0


def _serve(agent: Agent) -> int:
    """Does this host's part of a run that another leads; ends as the run does."""
    agent.serve()
    if agent.exit_code is None:
        print("samestep: the head of the run has hung up: its host, or the network, is gone", file=sys.stderr)
        return 1
    return agent.exit_code


def _announce(plan: Plan) -> None:
    if len(plan.parts) > 1:
        machines = len({part.machine for part in plan.parts})
        hosts = "one host" if machines == 1 else f"{machines} hosts"
        threads = ", ".join(dict.fromkeys(f"{part.threads}" for part in plan.parts))
        print(f"samestep: {plan.size} ranks on {hosts}, threads for each: {threads}", file=sys.stderr)
    elif plan.size > 1 or plan.pinned:
        chosen = variable("OMP_NUM_THREADS")
        line = describe(read_cores(), plan.size, plan.parts[0].threads, plan.pinned, chosen=chosen)
        print(f"samestep: {line}", file=sys.stderr)
    warning = binding_warning([read_cores().usable] * plan.size, read_unbound(), launcher="env")
    if len(plan.parts) == 1 and warning is not None:
        print(f"samestep: note: {warning}", file=sys.stderr)
    if plan.size == 1 and {"-n", "--nproc-per-node", "--nproc_per_node"} & set(plan.arguments):
        print("samestep: note: options behind the script are its own; this is 1 process", file=sys.stderr)


def _parser() -> Parser:
    parser = Parser(
        "run",
        usage="samestep run [options] (script.py | -m module) [args…]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    add("-n", dest="ranks", metavar="N", type=_ranks, help="processes on each host; auto: one per GPU, else 1")
    add("-m", dest="module", action="store_true", help="what follows is a module's name, as with python -m")
    add("--run-dir", metavar="DIR", type=Path, help="keep logs here, not in runs/<script>-<time>-<hex>")
    add("--json", metavar="FILE", type=Path, help="write exit code, run directory and failure to this file")
    add("--dry-run", action="store_true", help="print the exact commands and variables, start nothing")
    add(
        "--pass-local-rank",
        dest="local_rank",
        action="store_const",
        const="--local-rank",
        help="pass --local-rank=K to the script (--pass-local_rank: --local_rank=K), as torch.distributed.launch does",
    )
    parser.also("--pass-local_rank", "--pass_local_rank", dest="local_rank", action="store_const", const="--local_rank")
    add("--start", choices=("auto", "fork", "spawn"), default="auto", help=START)
    add(
        "--restarts", metavar="K", type=_count, default=0, help="after a failure start all ranks again, K times at most"
    )
    parser.also("--max-restarts", "--max_restarts", dest="restarts", type=_count)
    parser.also("--nproc-per-node", "--nproc_per_node", dest="ranks", type=_ranks)
    parser.also("--standalone", dest="standalone", action="store_true")  # what run does anyway
    add(
        "--grace",
        metavar="S",
        type=float,
        default=SAVING,
        help="seconds to save in after SIGTERM (default: %(default)g)",
    )
    add("--pin", action="store_true", help="bind each rank of this machine to cores of its own")
    add_options(parser)
    parser.verbatim = ("--ssh-args", "--sbatch-args")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _ranks(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes; give 1 or more, or auto")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of restarts; give 0 or more")
    return int(text)


def _check(options: argparse.Namespace) -> None:
    if not options.program:
        raise UsageError("no script is given: `samestep run -n 2 train.py`, or `-m module`")
    if options.lost_host != "stop" and not options.restarts:
        raise UsageError(f"--lost-host {options.lost_host} is about what follows: say --restarts K, how often, as well")
    program = options.program[0]
    _check_module(program) if options.module else _check_script(program)


def _plan(options: argparse.Namespace, parts: tuple[Part, ...]) -> Plan:
    program, *arguments = options.program
    return Plan(
        parts=parts,
        directory=RunDirectory(_run_path(options.run_dir, program)),
        run_id=secrets.token_hex(4),
        program=program,
        arguments=tuple(arguments),
        is_module=options.module,
        local_rank_option=options.local_rank,
        start=options.start,
        pinned=options.pin,
        restarts=options.restarts,
        grace=options.grace,
        lost_host=options.lost_host,
    )


def _check_script(program: str) -> None:
    path = Path(program)
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(f"{program} is a directory without a __main__.py: name a script")
    if not path.exists():
        hint = f"; for the module, `samestep run -m {program}`" if "/" not in program and path.suffix != ".py" else ""
        raise UsageError(f"there is no script {program} in {Path.cwd()}: check the path{hint}")


def _check_module(name: str) -> None:
    sys.path.insert(0, str(Path.cwd()))  # as python -m does
    try:
        spec = _find(name)
        runnable = spec is None or spec.submodule_search_locations is None or _find(f"{name}.__main__")
    finally:
        sys.path.pop(0)
    if spec is None:
        hint = "a file needs no -m" if name.endswith(".py") else "check the name, and that it is installed"
        raise UsageError(f"there is no module {name}: {hint}")
    if not runnable:
        raise UsageError(f"{name} is a package without a __main__.py: name one of its modules")


def _find(name: str) -> ModuleSpec | None:
    """Finds a module as `importlib.util.find_spec` does, but imports none of the packages above it."""
    first, *rest = name.split(".")
    spec = find_spec(first) if first else None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        first = f"{first}.{part}"
        spec = PathFinder.find_spec(first, spec.submodule_search_locations)
    return spec


def _run_path(asked: Path | None, program: str) -> Path:
    if asked is None:
        return default_run_path(program)
    if (asked / "run.json").exists():
        raise UsageError(f"{asked} holds another run already: name a new directory, or leave --run-dir out")
    return asked.absolute()


def _show(options: argparse.Namespace) -> None:
    """Prints what would be started, in a form that a shell would take."""
    where = place(options)
    count = options.ranks or visible_gpus() or 1
    parts: tuple[Part, ...] = (part_here(count),)
    if isinstance(where, Call):
        for start in where.starts():
            print(f"# on {', '.join(start.hosts)}; address and token go to its standard input\n{start}\n")
        parts = tuple(replace(parts[0], name=host, machine=host, interface="<found>") for host in where.hosts)
    plan = _plan(options, parts)
    print(f"# run directory: {plan.directory.path}")
    print("# MASTER_PORT is bound when the run starts; rank 0 inherits its socket and serves the store on it")
    if plan.start == "fork" or (plan.start == "auto" and plan.size > 1):
        print("# the ranks are forked from one process that has imported torch, and each does what its command says")
    for rank in range(plan.size):
        chosen = {**plan.variables(rank), "MASTER_PORT": "<port>"}
        if len(parts) > 1:
            chosen["MASTER_ADDR"] = "<address>"
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in chosen.items())
        print(f"\n# rank {rank}\n{variables} \\\n  {shlex.join(plan.command(rank))}")
