"""`samestep run`: a script, unchanged, on N processes of this machine."""

from __future__ import annotations

import argparse
import atexit
import os
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from samestep.cli.checks import check_outputs, check_program, check_run_path, run_path, write_json
from samestep.cli.hosts import (
    add_options,
    forwarded_environment,
    host_mode,
    listed,
    local_rank_count,
    open_hosts,
    reject_ineffective,
)
from samestep.cli.options import Parser, add_fake_gpus, add_local_rank, seconds, whole
from samestep.errors import UsageError
from samestep.fake_gpus import VARIABLE, about_fake_gpus
from samestep.fake_gpus.suggestion import ends_of, suggest, wants_gpus
from samestep.launch.controller import Controller
from samestep.launch.cpus import binding_warning, describe, read_cores, unbound_cores
from samestep.launch.hosts import mpiexec
from samestep.launch.hosts.foreground_agent import run_foreground_agent
from samestep.launch.hosts.join import Replacement
from samestep.launch.hosts.preflight import HostRanks
from samestep.launch.hosts.slurm import LEAVE_TIME_S, BatchJob, batch_script, submit, warning_for
from samestep.launch.hosts.sources import NodeSpec, TransportSpec, notify_end
from samestep.launch.monitor.hang import HANG_AFTER_S
from samestep.launch.output.console import say
from samestep.launch.process import end_for_mpiexec
from samestep.launch.resources import visible_gpus
from samestep.launch.result import RunResult, summary_lines
from samestep.launch.run import RunSpec, launch, local_ranks, misplaced, summary
from samestep.launch.supervisor import DEFAULT_GRACE_S
from samestep.paths import RunDirectory, rank_file
from samestep.rankenv import set_variables, variable
from samestep.verification.online.outcome import online_outcome

DESCRIPTION = """Starts a script on N processes (ranks) of this machine, or of several, and waits for them.

Every rank sees the variables that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, …), so a script
written for it runs unchanged. Each rank's output is shown live and kept in the run directory. When a rank
fails the others are stopped, and the last lines name the culprit, its own line, and where the logs lie."""

START = """how ranks start: fork copies one process that has imported torch (several times faster), spawn takes fresh
interpreters; auto forks when there are several ranks and the script does not forbid it"""

CHECK = """while it trains, compare the ranks every 16 steps (weights, gradients, rates, steps, collectives, samples)
and say at once what differs; the training is not changed, and no rank waits for another"""

FRESH = """samestep.checkpoint starts anew: checkpoints in its directory move to replaced-1, replaced-2 …"""

ON_HANG = """what becomes of a hang: stop ends the run with exit code 124, wait goes on waiting, auto stops only what
cannot go on by itself: ranks in different collectives, each waiting for the others"""

EXAMPLES = """options stand before the script; everything after it is the script's.

examples:
  samestep run -n 2 train.py --lr 0.1        two processes
  samestep run train.py                      one process per GPU; one where there is none
  samestep run -n 4 -m package.train --lr 1  a module, as with python -m
  samestep run -n 4 --fake-gpus train.py     a script for CUDA and NCCL, on CPUs, as if there were 4 GPUs
  samestep run -n 2 --check train.py         say at once where the ranks are not one training
  samestep run -n 2 --restarts 3 train.py    start again after a failure, from the last checkpoint
  samestep run --mpi -n 4 train.py           mpiexec starts the ranks: for init_process_group("mpi")
  samestep run --hosts node[1-3] -n 4 train.py           over ssh; --dry-run shows the commands
  samestep run --slurm --nnodes 2 -n 4 train.py          queue it; --dry-run shows the batch script
  srun -N2 -n8 samestep run train.py                     a rank for each task; the same under mpiexec
  samestep run --nnodes 2 --node-rank 0 --rendezvous node1:29500 train.py      by hand, once on each host

torchrun's spellings are accepted: --nproc-per-node, --max-restarts, --master-addr, --master-port, with
underscores too.

exit code: 0; else the culprit's own; 128 + signal if a signal ended it; 1 for a rank that exited early with
code 0 while others waited for it, or where --check found an error; 124 for a hang that was stopped; 75 when it
was asked to make room and has saved; 2 for a usage error."""

_CHECKER = "samestep.verification.online.checker:Checker"
_MPI_STARTED = ("PMI_RANK", "OMPI_COMM_WORLD_RANK")  # set by mpiexec
_NOT_FOR_MPI_TASKS = {"mpi", "ranks", "dry_run"}  # options of mpiexec itself, by their names in the parsed options
_NOT_FOR_SLURM_TASKS = {"slurm", "sbatch_args", "nnodes", "node_rank", "rendezvous", "master_addr", "master_port"}
_NOT_FOR_SLURM_TASKS |= {"ranks", "module", "run_dir", "env", "dry_run", "without_meaning"}


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = _parser()
    options = parser.parse(arguments)
    _apply_settings(options)
    _check(options)
    if options.mpi:
        _run_under_mpiexec(options, parser.without(arguments, _NOT_FOR_MPI_TASKS))
    if options.slurm:
        return _queue(options, parser.without(arguments, _NOT_FOR_SLURM_TASKS))
    if options.dry_run:
        _show(options)
        return 0
    where = host_mode(options)
    if isinstance(where, NodeSpec):
        atexit.register(end_for_mpiexec)  # with the code of this task, whatever has become of its rank
        if where.index > 0:
            return run_foreground_agent(where, local_rank_count(options, where), say)
    if where is None and options.lost_host == "continue":
        raise UsageError("--lost-host continue goes on with the hosts that are left, and this is the only one")
    check_outputs(options, "json")
    path = run_path(options.run_dir, options.program[0])
    check_run_path(path)
    with open_hosts(options, where) as (controller, parts, replacement):
        spec = _spec(options, parts, path)
        _announce(spec)
        result = _launch(spec, controller, replacement)
        if isinstance(where, NodeSpec):
            notify_end(controller, _end_text(result), result.exit_code)
    _suggest_fake_gpus(spec, result)
    report, code = summary(spec, result), result.exit_code
    if options.check:
        checked = online_outcome(spec.directory.path, spec.size)
        report |= checked
        code = code or int(checked["verdict"] == "different")
    return write_json(options.json, report | {"exit": code}, code)


def _apply_settings(options: argparse.Namespace) -> None:
    """Reads the settings: processes where -n does not say, and variables for the ranks."""
    from samestep.planning.settings import Settings, load

    found = Settings() if options.settings is None else load(options.settings)
    options.ranks = options.ranks or found.processes
    options.ranks = options.ranks or options.fake_gpus or None  # one process for each GPU
    fresh = {"SAMESTEP_FRESH": "1"} if options.fresh else {}  # read by samestep.checkpoint
    options.settings = {**found.variables, **fresh}


def _launch(spec: RunSpec, controller: Controller, replacement: Replacement) -> RunResult:
    try:
        return launch(spec, controller, replacement)
    except OSError as error:
        if error.filename is None or not Path(error.filename).is_relative_to(spec.directory.path):
            raise
        raise UsageError(f"the run directory {spec.directory.path} cannot be written: {error.strerror}") from error


def _end_text(result: RunResult) -> str:
    cause = next((line for line in summary_lines(result, None) if line.startswith("samestep: ")), "")
    return f"the run is over, exit code {result.exit_code}{cause.replace('samestep:', ':', 1)}"


def _suggest_fake_gpus(spec: RunSpec, result: RunResult) -> None:
    """Suggests `--fake-gpus` where the script has failed because it needs GPUs."""
    if spec.fake_gpus is not None or variable(VARIABLE):
        return
    ranks, gpus = max(part.ranks for part in spec.parts), visible_gpus()
    if gpus < ranks:
        logs = [rank_file(spec.logs(0)[0], 0, kind) for kind in ("out", "err")]
        if wants_gpus([result.root_cause.traceback] if result.root_cause else []) or wants_gpus(ends_of(logs)):
            say(suggest("run", spec.program, gpus, ranks))


def _run_under_mpiexec(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Becomes an mpiexec of as many tasks as there are ranks; does not return."""
    if options.ranks is None or options.slurm or options.hosts or options.hostfile or options.nnodes:
        raise UsageError(
            "--mpi has the mpiexec of this machine start the ranks, so many as -n says: `samestep run --mpi -n 4 "
            "train.py`; on several hosts write the mpiexec yourself: `mpiexec --hostfile F -n 8 samestep run train.py`"
        )
    if options.restarts:
        raise UsageError(
            "MPI cannot begin twice under one mpiexec, so --restarts does not go with --mpi: leave it out, and call "
            "the command again; training resumes from its checkpoint"
        )
    if any(variable(name) is not None for name in _MPI_STARTED):
        raise UsageError("an mpiexec has started this process already: leave out either it or --mpi")
    task = (sys.executable, "-P", "-m", "samestep", "run", *arguments, *options.program)
    words = mpiexec.command(options.ranks, task)
    if options.dry_run:
        print(shlex.join(words))
        raise SystemExit(0)
    if find_spec("mpi4py") is None:
        raise UsageError("the ranks need mpi4py, which is not installed here: pip install 'samestep[mpi]' brings it")
    set_variables({"I_MPI_PIN": variable("I_MPI_PIN") or "off"})  # Intel's would bind each rank's threads to one core
    os.execv(words[0], words)  # noqa: S606


def _queue(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    path = run_path(options.run_dir, options.program[0])
    forwarded_environment(options.env)  # each must be there
    job = BatchJob(
        program=(*(["-m"] if options.module else []), *options.program),
        directory=Path.cwd(),
        run_dir=path,
        options=tuple(arguments),
        nodes=options.nnodes or 1,
        ranks=options.ranks,
        sbatch_args=options.sbatch_args,
        wait=LEAVE_TIME_S if options.lost_host == "stop" else 0,
        variables=tuple(dict.fromkeys(options.env)),
        warning=warning_for(options.grace),
    )
    script = batch_script(job)
    if options.dry_run:
        print(script, end="")
        return 0
    check_outputs(options, "json")
    number = submit(script, path)
    print(f"job {number} is queued; its output comes to {path}/slurm-{number}.out")
    return 0


def _announce(spec: RunSpec) -> None:
    if len(spec.parts) > 1:
        machines = len({part.machine for part in spec.parts})
        hosts = "one host" if machines == 1 else f"{machines} hosts"
        threads = " or ".join(dict.fromkeys(f"{part.threads}" for part in spec.parts))
        say(f"{spec.size} ranks on {hosts}, {threads} CPU thread{'' if threads == '1' else 's'} for each rank")
    elif spec.size > 1 or spec.pinned:
        chosen = variable("OMP_NUM_THREADS")
        say(describe(read_cores(), spec.size, spec.parts[0].threads, spec.pinned, chosen=chosen))
    if spec.fake_gpus is not None:
        for line in about_fake_gpus(spec.fake_gpus, max(part.ranks for part in spec.parts), visible_gpus()):
            say(line)
    warning = binding_warning([read_cores().usable] * spec.size, unbound_cores(), launcher="env")
    if len(spec.parts) == 1 and warning is not None:
        say(f"note: {warning}")
    if misplaced(spec):
        say("note: options behind the script are its own, and this is 1 process: `samestep run -n N train.py` starts N")


def _parser() -> Parser:
    parser = Parser(
        "run",
        usage="samestep run [options] (script.py | -m module) [args…]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add, restarts = parser.add_argument, whole("number of restarts", 0)
    add("-n", dest="ranks", metavar="N", type=_ranks, help="processes on each host; auto: one per GPU, else 1")
    add("-m", dest="module", action="store_true", help="what follows is a module's name, as with python -m")
    add("--run-dir", metavar="DIR", type=Path, help="keep logs here, not in runs/<script>-<time>-<hex>")
    add("--json", metavar="FILE", type=Path, help="write exit code, run directory and failure to this file")
    add("--dry-run", action="store_true", help="print the exact commands and variables, start nothing")
    add_local_rank(parser)
    add("--start", choices=("auto", "fork", "spawn"), default="auto", help=START)
    add(
        "--restarts",
        metavar="K",
        type=restarts,
        default=0,
        help="after a failure start all ranks again, K times at most",
    )
    parser.also("--max-restarts", "--max_restarts", dest="restarts", type=restarts)
    parser.also("--nproc-per-node", "--nproc_per_node", dest="ranks", type=_ranks)
    parser.also("--standalone", dest="standalone", action="store_true")  # what run does anyway
    parser.also("--hash-seeds", dest="hash_seeds", action="store_true")  # of `samestep verify`
    add(
        "--grace",
        metavar="S",
        type=seconds,
        default=DEFAULT_GRACE_S,
        help="seconds to save in after SIGTERM (default: %(default)g)",
    )
    add("--check", action="store_true", help=CHECK)
    add("--fresh", action="store_true", help=FRESH)
    add(
        "--hang-after",
        metavar="S",
        type=seconds,
        default=HANG_AFTER_S,
        help="seconds in which no rank moves, and that are 5 steps or more, until a hang is explained "
        "(default: %(default)g)",
    )
    add("--on-hang", choices=("auto", "stop", "wait"), default="auto", help=ON_HANG)
    add("--settings", metavar="FILE", type=Path, help="start with what `samestep plan --apply FILE` has chosen")
    add("--no-events", dest="events", action="store_false", help="do not write down where each step's time goes")
    add_fake_gpus(parser, "one for each of its ranks")
    add("--mpi", action="store_true", help="have mpiexec start the ranks, for scripts whose backend is mpi")
    add("--pin", action="store_true", help="bind each rank of this machine to cores of its own")
    add_options(parser)
    parser.verbatim = ("--ssh-args", "--sbatch-args")
    add("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def _ranks(text: str) -> int | None:
    if text == "p":
        raise argparse.ArgumentTypeError("-np is mpiexec's; here it is -n N")
    return None if text == "auto" else whole("number of processes", 1, ", or auto")(text)


def _check(options: argparse.Namespace) -> None:
    if not options.program:
        raise UsageError("no script is given: `samestep run -n 2 train.py`, or `-m module`")
    reject_ineffective(options)
    if options.lost_host != "stop" and not options.restarts:
        raise UsageError(f"--lost-host {options.lost_host} is about what follows: say --restarts K, how often, as well")
    check_program(options.program[0], is_module=options.module)


def _spec(options: argparse.Namespace, parts: tuple[HostRanks, ...], path: Path) -> RunSpec:
    program, *arguments = options.program
    return RunSpec(
        parts=parts,
        directory=RunDirectory(path),
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
        hang_after=options.hang_after,
        on_hang=options.on_hang,
        observers=(_CHECKER,) if options.check else (),
        events=options.events,
        hash_seeds=getattr(options, "hash_seeds", False),
        settings=options.settings,
        fake_gpus=options.fake_gpus,
    )


def _show(options: argparse.Namespace) -> None:
    """Prints what would be started, in a form that a shell would take."""
    where = host_mode(options)
    parts: tuple[HostRanks, ...] = (local_ranks(options.ranks or visible_gpus() or 1),)
    if isinstance(where, TransportSpec):
        for start in where.starts():
            print(f"# on {', '.join(start.hosts)}; address and token go to its standard input\n{start}\n")
        hosts = [(host.name, options.ranks or host.slots or parts[0].ranks) for host in listed(options)]
        parts = tuple(replace(parts[0], name=name, machine=name, ranks=n, interface="<found>") for name, n in hosts)
    elif where is not None:
        ranks = local_rank_count(options, where)
        names = [f"{where.word} {index}" for index in range(where.count)]
        parts = tuple(replace(local_ranks(ranks), name=name, machine=name, interface="<found>") for name in names)
        print(f"# {names[where.index]} of {where.count}; sizes and ranks hold if every {where.word} brings {ranks}")
    spec = _spec(options, parts, run_path(options.run_dir, options.program[0]))
    unknown = _unknown_variables(where, len(parts))
    print(f"# run directory: {unknown.get('SAMESTEP_RUN_DIR', spec.directory.path)}")
    print("# MASTER_PORT is bound when the run starts; rank 0 inherits its socket and serves the store on it")
    if len(parts) > 1:
        print("# what stands in <> is found when all have come")
    if spec.start == "fork" or (spec.start == "auto" and max(part.ranks for part in parts) > 1):
        print("# the ranks are forked from one process that has imported torch, and each does what its command says")
    for rank in range(spec.size):
        if not isinstance(where, NodeSpec) or spec.owners[rank] is spec.parts[where.index]:
            chosen = {name: unknown.get(name, value) for name, value in spec.variables(rank).items()}
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in chosen.items())
            print(f"\n# rank {rank}\n{variables} \\\n  {shlex.join(spec.command(rank))}")


def _unknown_variables(where: TransportSpec | NodeSpec | None, parts: int) -> dict[str, str]:
    """Returns the variables of which a command alone does not say the values."""
    found = {"MASTER_PORT": "<port>"} | ({"MASTER_ADDR": "<address>"} if parts > 1 else {})
    if isinstance(where, NodeSpec) and where.index > 0:
        theirs = ("TORCHELASTIC_RUN_ID", "SAMESTEP_RUN_DIR", "SAMESTEP_LOGS")
        found |= dict.fromkeys(theirs, f"<of {where.word} 0>")
    if isinstance(where, NodeSpec) and where.launcher is not None:  # tasks may share a host
        local = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS", "SAMESTEP_LOGS")
        found |= dict.fromkeys(local, "<found>")
    return found
