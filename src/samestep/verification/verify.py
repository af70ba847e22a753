"""The whole of `samestep verify`: record, judge, run the script alone, judge again, and say it."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.text import plural
from samestep.verification import claims, locating, machine, numerics, restart, runs
from samestep.verification.failures import blame, ended_alone, reason_of
from samestep.verification.files import Files, written_folders
from samestep.verification.findings import AGREES, DECISIVE, DECLARED, PROVED, unchecked
from samestep.verification.journal import Event
from samestep.verification.judging import (
    average,
    by_hand,
    chance,
    communication,
    compression,
    control,
    cut,
    evaluation,
    later,
    moved,
    own_data,
    owned,
    parts,
    rates,
    reached,
    samples,
    shards,
    states,
    storage,
    unloaded,
)
from samestep.verification.judging.in_step import InStep
from samestep.verification.judging.others import Others
from samestep.verification.judging.own_pace import (
    arrives,
    begins_apart,
    each_has_all,
    ends_with_as_many,
    follows,
    judge_tail,
    parted,
    sudden,
)
from samestep.verification.judging.passes import are_loaded
from samestep.verification.judging.record import BY_THEMSELVES, Record, Run
from samestep.verification.judging.reference import Comparison, is_nearer
from samestep.verification.judging.updates import Updates
from samestep.verification.recording.limit import LONGER, PASSES, SMALL, STEPS
from samestep.verification.report import Report, is_open
from samestep.verification.runner import Runner, Say, fork_server_for, gpus_of_one

__all__ = ["verify"]

NO_STEP = "no optimizer of torch.optim has stepped, and no parameter was changed in place behind a backward pass"
_OF_STEPS = {"gradient-scale", "gradient-differs", "update-differs", "learning-rate-differs", "steps-differ"}
_OF_TRAINING = ("initial_state", "gradients", "updates", "parameters", "data", "control")  # what decides, of steps
_LAST = 2  # steps that are compared where one process parts from the ranks
_MORE = 16  # times as many steps, where one rank takes all of them by itself


def verify(
    script: str | os.PathLike[str],
    *arguments: str,
    ranks: int = 2,
    steps: int = STEPS,
    timeout: float = runs.HANG_TIMEOUT_S,
) -> Report:
    """Runs a script on several ranks and alone, and returns whether it is the same training.

    The script runs unchanged, in processes of its own, two times or more; docs/verify-method.md says what is compared.

    Args:
        script: path of a Python file that trains.
        arguments: its command line.
        ranks: how many processes are compared with one.
        steps: how many optimizer steps are compared at most. Behind them passes over the data are ended early, to reach
            an evaluation, a save and a resume.
        timeout: seconds in which no rank computes, reads or records anything until a run counts as hung.

    Returns:
        The report: `report.verdict` is "same", "different" or "inconclusive"; `str(report)` is what the command line
        shows; `report.require_same()` raises AssertionError with that text otherwise, which suits a test.

    Raises:
        UsageError: there is no such script.

    Example:
        >>> import samestep, tempfile, pathlib
        >>> script = pathlib.Path(tempfile.mkdtemp()) / "train.py"
        >>> _ = script.write_text("print('nothing is trained here')")
        >>> samestep.verify(script).verdict
        'inconclusive'
    """
    if not Path(script).exists():
        raise UsageError(f"there is no script {script}: check the path")
    if ranks < 2:
        raise UsageError(f"ranks={ranks}: at least 2 are compared with one process")
    return examine(runs.Script(program=str(script), arguments=arguments), ranks, steps=steps, still_s=timeout)


def examine(
    script: runs.Script,
    ranks: int,
    *,
    steps: int = STEPS,
    still_s: float = runs.HANG_TIMEOUT_S,
    say: Say = lambda _: None,
) -> Report:
    folder = Path(tempfile.mkdtemp(prefix="samestep-verify-"))
    try:
        with fork_server_for(script, ranks) as fork_server:
            program = None if script.is_module else Path(script.program)
            files = Files(written_folders(script.arguments, program), folder)
            runner = Runner(
                script=script,
                ranks=ranks,
                folder=folder,
                still_s=still_s,
                say=say,
                files=files,
                fork_server=fork_server,
                gpus_of_one=gpus_of_one(ranks),
            )
            report = _verified(runner, steps)
            report.remarks += filter(None, [files.remark()])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.script = tuple(script.words())
    return report


def _recorded(runner: Runner, steps: int) -> tuple[Run, Run | None, list[str]]:
    """Runs the ranks, and the script alone, which a pipeline does not need; returns both and what is to be said of it.

    A script may count on every batch, or one rank may have all of them: then it fails where a pass ends early, and is
    run once more without that.
    """
    recorded, whole = _both(runner, steps, PASSES, "all samples")
    if (without := _without_own_training(runner, steps, recorded.record)) is not None:
        return without
    if (rank := ended_alone(recorded)) is not None:
        recorded, whole = _both(runner, _MORE * steps, 0, "all samples of more steps")
        return recorded, whole, [f"rank {rank} takes more than {steps} steps by itself, so more were recorded"]
    is_unequal = recorded.has_failed and not reached.are_alike(recorded.record)
    if reached.is_cut(recorded.record) and (is_unequal or (whole is not None and whole.has_failed)):
        recorded, whole = _both(runner, steps, 0, "all samples of whole passes")
        return recorded, whole, ["no pass was ended early: the script fails where one is"]
    ended_well = whole is not None and not (recorded.has_failed or whole.has_failed)
    if ended_well and whole is not None and InStep(recorded.record, whole).may_become_known:
        steps = max(steps, recorded.record.asked)
        recorded, whole = _both(runner, steps, PASSES, "all samples, the ranks' weights in every step", keep_all=True)
    return recorded, whole, reached.remarks(recorded.record)


def _without_own_training(runner: Runner, steps: int, record: Record) -> tuple[Run, Run | None, list[str]] | None:
    """Runs both without the optimizers that only some ranks make, where all ranks then take the same steps.

    Rank 0 may pre-train a part of the model by itself, or train a probe of what has been learned.
    """
    made = [{event["where"]: event["name"] for event in rank.of("optimizer")} for rank in record.ranks]
    own = sorted({where for theirs in made for where in theirs if any(where not in other for other in made)})
    if not own or len(made) < runner.ranks or record.is_by_hand:
        return None
    runner.left_out = own
    recorded, whole = _both(runner, steps, PASSES, "all samples of what all ranks train")
    ranks = recorded.record.ranks
    if recorded.has_failed or not recorded.record.steps or len({len(rank.steps) for rank in ranks}) > 1:
        runner.left_out = []
        return None
    rank = next(number for number, theirs in enumerate(made) if own[0] in theirs)
    what = f"rank {rank} trains by itself with the optimizer of {own[0]}: its steps were not compared"
    return recorded, whole, [what, *reached.remarks(recorded.record)]


def _both(runner: Runner, steps: int, passes: int, name: str, *, keep_all: bool = False) -> tuple[Run, Run | None]:
    recorded = runner.first(steps, passes, keep_all=keep_all)
    is_default = bool(passes) and steps == STEPS
    if is_default and not recorded.has_failed and _goes_on(recorded.record):
        recorded = runner.first(LONGER * steps, passes, keep_all=keep_all, goes_on=True)
    record = recorded.record
    is_pipeline = states.staged(record) or states.several(record) or states.scheduled(record)
    if is_pipeline and not recorded.has_failed:
        return recorded, None
    whole = runner.alone(name, record)
    if not recorded.has_failed and InStep(record, whole).may_accumulate_in_turn:
        runner.batch_after_batch = True
        in_turn = runner.alone(f"{name}, one rank's after the other's", record)
        runner.batch_after_batch = InStep(record, in_turn).is_in_step
        whole = in_turn if runner.batch_after_batch else whole
    if not recorded.has_failed and chance.draw_for_all_rows(record, whole):
        runner.strided = True
        strided = runner.alone(f"{name}, draws cut by [rank::world_size]", record)
        runner.strided = is_nearer(record, strided, whole)
        whole = strided if runner.strided else whole
    if whole.unjoinable is not None and not recorded.has_failed:  # what does not depend on the samples is compared
        alone = runner.alone(f"{name}, of one rank", record, [record.data.ranks[0].number])
        whole = whole if alone.has_failed else replace(alone, apart=whole.unjoinable)
    return recorded, whole


def _goes_on(record: Record) -> bool:
    """Whether what a script does behind these steps would be seen in more: it has no pass to end, and a small model."""
    numbers = [start.get("numbers", 0) for rank in record.ranks for start in rank.of("start")[:1]]
    is_small = 0 < max(numbers, default=0) <= SMALL
    return is_small and record.is_cut_short and not are_loaded(record)


def _verified(runner: Runner, steps: int) -> Report:
    recorded, whole, remarks = _recorded(runner, steps)
    record = recorded.record
    steps = max(steps, record.asked)
    report = Report(ranks=record.size or runner.ranks, steps=record.asked, remarks=remarks)
    cut_by_hand = None if whole is None else states.by_hand(record, whole)
    foreign = states.foreign_to(record) or cut_by_hand
    if foreign is not None:
        for name in DECISIVE:
            report.cover(name, unchecked(foreign))

    @functools.cache
    def run_at_own_pace() -> Run:
        return runner.recorded("one process at its own pace", 1, steps=record.size * (record.steps + 1) + 1)

    def own_pace() -> Record:
        return run_at_own_pace().record

    judges: list[Callable[[Record, Report], None]] = [communication.judge, storage.judge]
    owns = False
    if whole is not None and foreign in {None, BY_THEMSELVES, cut_by_hand} and not recorded.has_failed:
        with leaving_open(report):
            owns = owned.are_held(record) and _judge_owned(runner, record, run_at_own_pace(), report)
    are_replicas = foreign is None and not owns
    if are_replicas:
        of_states = functools.partial(states.judge, own_pace=own_pace)
        of_samples = functools.partial(samples.judge, own_pace=own_pace)
        judges = [of_states, of_samples, control.judge, *judges]
    for judge in judges if record.ranks else []:
        with leaving_open(report):
            judge(record, report)
    ended_well = whole is not None and not (whole.has_failed or recorded.has_failed)
    if record.steps and foreign is not None and ended_well and not owns:
        with leaving_open(report):
            first = _first_steps(runner, record) if foreign == cut_by_hand else None
            _judge_cut(record, own_pace(), report, first)
    if record.ranks and whole is not None and are_replicas:
        with leaving_open(report):
            chance.judge(record, whole, report)
            shards.judge(record, whole, report)
            samples.judge_sampler(record, whole.record, report)
            storage.judge_saved(record, whole.record, report)
    if whole is None:
        with leaving_open(report):
            _judge_pipeline(runner, record, report)
            if states.scheduled(record):
                _judge_cut(record, own_pace(), report)
        report.conclude()
        report.remarks += _remarks(recorded.ended, report)
        return report
    is_followed = False
    if are_replicas:
        with leaving_open(report):
            _compare(runner, record, whole, own_pace, report)
            _compare_later(runner, record, whole, own_pace, report)
            if record.steps and not recorded.has_failed:
                is_followed = _judge_own_pace(runner, record, run_at_own_pace(), report, decides=whole.has_failed)
            if record.steps and not (recorded.has_failed or whole.has_failed):
                _judge_sudden(runner, record, own_pace(), report)
                judge_tail(record, own_pace(), report)
                _withdraw_rounding(runner, record, whole, report)
    if recorded.has_failed:
        blame(recorded, whole, run_at_own_pace, report)
    elif whole.has_failed and not (owns or is_followed):
        fault = machine.recorder_fault(whole.ended)
        fails = f"alone, with the samples of all ranks, the script fails: {reason_of(whole.ended)}"
        report.inconclusive = fault or fails
    with leaving_open(report):
        claims.judge(runner, record, report)
    if not recorded.has_failed:
        with leaving_open(report):
            restart.judge(runner, record, {"steps": steps, "passes": PASSES}, report)
    of_replicas = (locating.by_lines, locating.by_decisions, locating.by_sources) if are_replicas else ()
    of_all = (locating.by_samples, locating.by_split, locating.by_local_tensors)
    for locate in () if recorded.has_failed else (*of_replicas, *of_all):
        with leaving_open(report):
            locate(runner, record, steps, report)
    report.conclude()
    report.remarks += _remarks(
        recorded.ended, report, [one["path"] for rank in record.ranks for one in rank.of("load")]
    )
    return report


@contextmanager
def leaving_open(report: Report) -> Iterator[None]:
    """A failure of samestep's own, while it judges, accuses no script: what it has found stands, the rest is open."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the script is not to blame
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        report.inconclusive = (
            f"samestep itself failed at {Path(where.filename).name}:{where.lineno} while it compared "
            f"({type(error).__name__}: {str(error)[:200]}): please report this with the traceback above"
        )


def _judge_pipeline(runner: Runner, record: Record, report: Report) -> None:
    if states.staged(record) is not None:
        control.judge(record, report)
        claims.judge_stages(runner, record, report)
    elif states.several(record) is not None:
        claims.judge_devices(runner, record, report)
    else:
        control.judge(record, report)
        claims.judge_schedules(record, report)


def _first_steps(runner: Runner, record: Record) -> parts.Parts | None:
    """Records the first steps of the ranks, and of one process at its own pace, in float64; all keep what they hold."""
    runner.plan(2)
    for type_, double in (("in float64", True), ("in their own types", False)):
        order = {"steps": parts.FIRST, "keep": [*range(parts.FIRST)], "everywhere": True, "double": double}
        name = f"{parts.FIRST} steps {type_}"
        ranks = runner.recorded(f"{record.size} ranks, {name}", record.size, **order)
        one = runner.recorded(f"one process at its own pace, {name}", 1, **order)
        if not (ranks.has_failed or one.has_failed) and ranks.record.steps and one.record.steps:
            return parts.Parts(ranks.record, one.record)
    return None


def _judge_owned(runner: Runner, record: Record, run: Run, report: Report) -> bool:
    """Compares optimizers that ranks hold for themselves with those of one process; returns whether they are the same.

    Where one process steps otherwise, nothing is said: the ranks are then judged as replicas.
    """
    number = owned.count(record, run.record)
    if not number and run.record.is_cut_short and owned.holds_more(run.record, record):
        run = runner.recorded("one process at its own pace, more steps", 1, steps=_MORE * record.steps)
        number = owned.count(record, run.record)
    if run.has_failed or not number:
        return False
    margin = f"{number} optimizers, each of one rank, step as those of one process at its own pace"
    report.remarks.append(margin)
    for name in _OF_TRAINING:
        report.cover(name, AGREES, margin)
    _judge_evaluation(runner, record, run, report)
    return True


def _judge_cut(record: Record, alone: Record, report: Report, first: parts.Parts | None = None) -> None:
    """Compares a model that the script cuts into parts with one process at its own pace, and then its evaluations.

    `first` has the values of the first steps, where the script cuts the model by itself.
    """
    known = first if first is not None and first.are_whole else None
    values = () if known is None else (known.places, known.summed)
    parts_of_one = cut.Parts(record, alone, *values)
    if not record.by_themselves:  # else there are several models, of which one may be that of one process
        parts_of_one.find_apart(report)
    if first is not None and not report.errors:
        report.add(first.equal_parts())
        report.add(first.scaled_parts())
        report.add(first.findings(inputs_are_known=first.have_the_same_inputs))
    if not report.errors and (first is None or first.agree()) and parts_of_one.cover(report):
        evaluation.judge(record, alone, report)


def _judge_own_pace(runner: Runner, record: Record, run: Run, report: Report, *, decides: bool = False) -> bool:
    """Compares the ranks with one process that loads its samples by itself, and takes steps at its own pace.

    Where it trains as the ranks do, from the first step to the last, no comparison of parts says more; `decides` says
    that no other process could be compared. Returns whether it is known to do so.
    """
    alone = run.record
    if not report.errors:
        own_data.judge(record, alone, report)
    if not report.errors and begins_apart(record, alone) and (first := _first_steps(runner, record)) is not None:
        report.add(first.findings(inputs_are_known=first.have_the_same_inputs, only_by_inputs=True))
    open_ones = [name for name in _OF_TRAINING if is_open(report, name)]
    of_samples = set() if record.is_cut_short or each_has_all(record) else locating.OF_SAMPLES
    drops_out = any(rank.of("stream", "mask") for rank in record.ranks)  # dropout is off in all runs
    accusing = [
        one
        for one in report.errors
        if one.code in _OF_STEPS
        or (one.property == "random" and not drops_out)
        or (one.property == "data" and one.code in of_samples)
    ]
    for found in [one for one in accusing if one.code == "steps-differ"] if ends_with_as_many(record, alone) else ():
        report.withdraw(found, AGREES, "one process at its own pace ends with as many samples as all ranks")
        accusing.remove(found)
    compares_evaluation = any(rank.of("evaluated", "ran") for rank in record.ranks)
    is_of_use = bool(open_ones or accusing) or compares_evaluation or decides
    if not is_of_use or run.has_failed or not _trains_the_same(runner, record, alone):
        return False
    margin = f"{plural(record.steps, 'step')} of one process at its own pace"
    for found in accusing:
        report.withdraw(found, AGREES, margin)
    for name in open_ones:
        report.cover(name, AGREES, margin)
    if compares_evaluation:
        _judge_evaluation(runner, record, run, report)
    return True


def _trains_the_same(runner: Runner, record: Record, alone: Record) -> bool:
    """Whether one process has the ranks' gradients or, where these have some of their own, their parameters."""
    if follows(record, alone) or arrives(record, alone):
        return True
    if states.averaged_behind(record) is None or not arrives(record, alone, by_parameters=True):
        return False
    last = record.ranks[0].steps[record.steps - 1]["window"]
    ranks, one = (
        runner.recorded(f"{name}, keeping the last step", number, steps=record.steps, keep=[0, 1, 2, last])
        for name, number in ((f"{record.size} ranks", record.size), ("one process at its own pace", 1))
    )
    has_failed = ranks.has_failed or one.has_failed
    return not has_failed and arrives(ranks.record, one.record, by_parameters=True)


def _judge_evaluation(runner: Runner, record: Record, run: Run, report: Report) -> None:
    """Compares evaluations with those of a process that has taken the ranks' steps; what differs, in float64 too."""
    compared = Report(ranks=record.size)
    evaluation.judge(record, run.record, compared, unnamed=True)
    if compared.coverage.get("evaluation") == AGREES:
        for found in [one for one in report.errors if one.code == "evaluation-inexact"]:
            report.withdraw(found, AGREES, "those of one process at its own pace")
        report.cover("evaluation", AGREES, "those of one process at its own pace")
    elif compared.errors and not report.errors and not record.is_cut_short:
        order: dict[str, Any] = {"steps": record.steps + 1, "double": True}
        ranks = runner.recorded(f"evaluations of {record.size} ranks in float64", record.size, **order)
        one = runner.recorded("evaluations of one process in float64", 1, **order)
        if not (ranks.has_failed or one.has_failed) and follows(ranks.record, one.record):
            in_float64 = Report(ranks=record.size)
            again = functools.cache(lambda: runner.recorded("the same once more", 1, **order))
            evaluation.judge(ranks.record, one.record, in_float64, again, unnamed=True)
            report.add(found for found in in_float64.errors if found.code == "evaluation-inexact")
            if in_float64.coverage.get("evaluation") == AGREES:
                report.cover("evaluation", AGREES, "those of one process at its own pace, in float64")


def _withdraw_rounding(runner: Runner, record: Record, whole: Run, report: Report) -> None:
    """Compares evaluations that are accused in float64, too: a number may be rounding alone, such as a residual."""
    accusing = [one for one in report.errors if one.code == "evaluation-inexact"]
    if not accusing or accusing != report.errors or whole.apart is not None:
        return
    order: dict[str, Any] = {"steps": record.steps, "passes": PASSES, "double": True}
    ranks = runner.recorded(f"evaluations of {record.size} ranks in float64", record.size, **order)
    alone = runner.alone("evaluations in float64", ranks.record, double=True)
    if ranks.has_failed or alone.has_failed:
        return
    for found in accusing:
        if evaluation.is_rounding(found.where, (record, whole.record), (ranks.record, alone.record)):
            report.withdraw(found, AGREES, "but for a number that is rounding alone, as float64 shows")


def _judge_sudden(runner: Runner, record: Record, alone: Record, report: Report) -> None:
    """Compares a step at which one process at its own pace suddenly parts from the ranks, in float64."""
    step = None if report.errors else sudden(record, alone)
    if step is None or own_data.draw_otherwise(record, alone, step["window"], within=True):
        return
    number, order = step["event"], {"steps": step["event"] + 1, "keep": [step["window"] - 1, step["window"]]}
    name = f"at their own pace in float64, to step {number}"
    ranks = runner.recorded(f"{record.size} ranks {name}", record.size, double=True, **order)
    one = runner.recorded(f"one process {name}", 1, double=True, **order)
    if not (ranks.has_failed or one.has_failed) and ranks.record.steps > number:
        report.add(parted(ranks.record, one.record, ranks.record.kept_steps[-_LAST:]))


def _conclude_on_data(record: Record, whole: Record, own_pace: Callable[[], Record], report: Report) -> None:
    """Data that no DataLoader yields are right if the gradients of all ranks are those of all samples."""
    if average.REMARK in report.remarks and report.coverage.get("gradients") == DECLARED:
        unloaded.judge(record, whole, own_pace, report)
        return
    compared = report.coverage.get("gradients") in {AGREES, DECLARED}
    if compared and not are_loaded(record):
        noted = any(finding.property == "data" for finding in report.findings)
        why = "the gradients of the compared steps are those of one process's batches"
        report.cover("data", DECLARED if noted else AGREES, why)
    elif not (compared or are_loaded(record)):
        found = unloaded.left_out_of_one_batch(record, whole) or unloaded.other_rows(record, own_pace())
        report.add([] if found is None else [found])


def _remarks(ended: runs.Ended, report: Report, loaded: Sequence[str] = ()) -> list[str]:
    bits = any(remark.startswith("as ") for remark in report.remarks) or report.coverage.get("pipeline") == PROVED
    but = " but those compared bit for bit" if bits else ""
    remarks = [f"dropout and reduced precision (autocast, TF32) were off in all runs{but}"]
    if ended.hung:
        remarks += [
            f"rank {rank} stands at {place}" for rank, place in sorted(runs.stack_positions(ended.folder).items())
        ]
    if report.steps == 0 and report.inconclusive is None and not ended.hung and ended.code == 0:
        report.inconclusive = f"{NO_STEP}: there is no training to compare{_finished(loaded)}"
    return remarks


def _finished(loaded: Sequence[str]) -> str:
    """What a script that has taken no step may have loaded: the checkpoint of a training that was over."""
    name = next((Path(path).name for path in loaded if Path(path).is_absolute()), None)  # else from memory
    if name is None:
        return ""
    return f"; the script has loaded {name}, which may be of a finished training: move it away, or ask for more epochs"


def _compare(
    runner: Runner, record: Record, whole: Run, own_pace: Callable[[], Record], report: Report, of: str = ""
) -> None:
    """Compares the ranks with the script alone, and with further runs of it, whose names end with `of`."""
    if not record.steps:
        return
    others = _further_runs(runner, record, whole, own_pace, of)
    if record.is_averaged_within:  # by its update it is known how such a step uses gradients
        compared = Updates(record, whole, others).judge(report)
        if record.is_by_hand:
            storage.judge_with(record, compared, report)
        report.remarks.append(by_hand.REMARK if record.is_by_hand else by_hand.WITHIN)
    Comparison(record, whole, others).judge(report)
    rates.judge_scaled(record, own_pace, report)
    rates.judge_settings(record, own_pace, report)
    if not record.is_averaged_within:
        Updates(record, whole, others).judge(report)
    if whole.apart is None:
        compression.judge(record, whole, report)
    if states.local_steps(record) is None:  # else the buffers are each rank's own
        moved.judge(record, whole, own_pace, report)
    if not report.errors:
        samples.judge_chosen(record, whole.record, report)
    if states.evaluates_apart(record):
        report.cover("evaluation", unchecked("between two averages each rank evaluates parameters of its own"))
    else:
        if not report.errors and states.averaged_behind(record) is None:
            evaluation.judge_swapped(record, whole, others.permuted, report)
        evaluation.judge(record, whole.record, report, others.permuted, apart=whole.apart is not None)
        storage.judge_moments(record, whole.record, report)
    _conclude_on_data(record, whole.record, own_pace, report)
    if whole.record.ranks and whole.record.ranks[0].of("collated"):
        report.remarks.append("batches of unlike shapes were made anew from their samples, by their collate_fn")


def _compare_later(runner: Runner, record: Record, whole: Run, own_pace: Callable[[], Record], report: Report) -> None:
    """Compares one more step, if its gradients suddenly have other norms than in one process."""
    if report.errors or report.coverage.get("gradients") not in {AGREES, DECLARED} or whole.apart is not None:
        return
    step = later.sudden(record, whole.record)
    if step is None:
        return
    number = step["event"]
    name = f"values of step {number} on {record.size} ranks"
    ranks = runner.recorded(name, record.size, steps=number + 1, keep=[step["window"]]).record
    again = Report(ranks=record.size, steps=number + 1)
    _compare(runner, ranks, runner.alone(f"step {number}", ranks), own_pace, again, f", to step {number}")
    report.add(one for one in again.errors if one.property == "gradients" and one.step == number)


def _further_runs(runner: Runner, record: Record, whole: Run, own_pace: Callable[[], Record], of: str) -> Others:
    everybody = [rank.number for rank in record.data.ranks]
    by_default = None if whole.apart is None else everybody[:1]

    def alone(name: str, record: Record = record, ranks: list[int] | None = by_default, **order: Any) -> Run:
        return runner.alone(f"{name}{of}", record, ranks, **order)

    def of_ranks(ranks: Sequence[int] = everybody, each: str = "", **order: Any) -> list[Run]:
        return runner.side_by_side(lambda rank: alone(f"samples of rank {rank}{each}", ranks=[rank], **order), ranks)

    def at_step(step: Event) -> list[Run]:
        name = f"step {step['event']} with samples of rank"
        return [alone(f"{name} {rank}", only=[step["window"], rank]) for rank in everybody]

    def of_group(ranks: list[int]) -> tuple[Run, Others]:
        name = f"samples of {len(ranks)} ranks that average" if len(ranks) > 1 else f"samples of rank {ranks[0]}"
        again = functools.partial(alone, f"{name}, another order", ranks=ranks, permuted=True)
        run = whole if ranks == everybody else alone(name, ranks=ranks)
        return run, Others(again, lambda: [run] if len(ranks) == 1 else of_ranks(ranks))

    def in_float64() -> tuple[Record, Run, Run]:
        kept = [step for rank in record.ranks[:1] for step in rank.steps if step["kept"] is not None]
        enough = max([numerics.STEPS_IN_FLOAT64, *(step["event"] + 1 for step in kept)])  # every step that is compared
        steps = record.steps if record.is_averaged_within else min(record.steps, enough)
        order = {"steps": steps, "double": True, "keep": [step["window"] for step in kept]}
        ranks = runner.recorded(f"{record.size} ranks in float64{of}", record.size, **order).record
        once = functools.partial(alone, record=ranks, ranks=None, double=True)
        return ranks, once("the same in float64"), once("the same in float64, another order", permuted=True)

    redrawn = [lambda: alone("draws cut by [rank::world_size]", strided=True)]
    if record.micro_batches:
        redrawn.append(lambda: alone("draws of one rank after the other", one_by_one=record.micro_batches))
    others = Others(
        permuted=functools.cache(lambda: alone("another order", permuted=True)),
        of_ranks=of_ranks,
        unclipped=lambda: of_ranks(unclipped=True),
        apart=lambda steps: alone("micro-batches apart", apart=[[one["window"], one["optimizer"]] for one in steps]),
        own_lengths=lambda: alone("with lengths of its own", own_lengths=True),
        own_pace=own_pace,
        of_group=of_group,
        in_float64=functools.cache(in_float64),
        in_turn=lambda: alone("a step for each of the ranks'", turns=len(everybody), unclipped=True),
        own_draws=lambda: alone("draws of its own", own_draws=True),
        redrawn=redrawn,
    )
    if runner.batch_after_batch:  # a step has more micro-batches than on a rank, and none is replaced
        return others
    return replace(
        others,
        merged=lambda steps: alone("whole steps at once", merged=[one["window"] for one in steps]),
        at_step=at_step,
        twice=lambda: of_ranks(everybody, ", each twice", twice=True),
    )
