"""Measures what one process's training is: runs an unmodified script for a few steps, watched, and stops it.

    caller                            the script, as `samestep run -n 1` starts it
      profile_script("train.py")  ->    samestep.planning.observer in it: steps, gradients, bytes
                                        samestep.planning.build_profile in it: other batches, layers
                                  <-    profile.json, and the process ends with its last measured step

Nothing in the script is changed, and nothing in it has to be known: it may be plain PyTorch, or use samestep or
DistributedDataParallel. What it prints is kept out of sight, and is told where it fails.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.launch.rank.environment import threads_per_rank
from samestep.launch.rank.script import find_module
from samestep.launch.start.prefork_server import PreforkServer
from samestep.pipelines.plan import ProgressLine
from samestep.planning.observer import RESULT
from samestep.planning.profile import Profile, load
from samestep.planning.step_trace import FEWEST
from samestep.text import plural
from samestep.verification import journal, runs

OBSERVER = "samestep.planning.observer:ProfilingObserver"

Say = Callable[[str], None]


def profile_script(
    script: str | Path,
    args: Sequence[str] = (),
    *,
    steps: int = 10,
    is_module: bool = False,
    threads: int | None = None,
    progress: Say | None = None,
    fork_server: PreforkServer | None = None,
) -> Profile:
    r"""Runs a script in one process for some steps, stops it, and returns what its training is.

    Three steps warm up, then `steps` are timed with nothing else measured in them, and three more tell when each
    gradient is ready. A script that ends before is measured on what there is, if that is four steps or more; the first
    never counts. Then the model alone is called with parts of a batch, and its layers are measured, where it can be cut
    (:func:`samestep.plan_pipeline`); the loss is not known there, so the sum of the outputs serves, and the times are
    scaled to those of the step. What the script writes to disk in these steps is written, but `samestep.checkpoint`
    neither reads nor writes where it says: what is profiled begins anew.

    Samples are dim 0 of the first tensor that the model is called with, added up over the backward passes of a step;
    with `samestep.shards` they are its global batch. Bytes of activations are those of one backward pass.

    Args:
        script: a Python file that trains, or with `is_module` the name of a module.
        args: its command line.
        steps: how many are timed; 3 or more.
        is_module: run it as `python -m` does.
        threads: that the process may use, as many as a rank will have; all of this machine's where None, and what
            OMP_NUM_THREADS says goes before either.
        progress: is told what goes on; by default a line on the terminal says it, and without one nothing does.
        fork_server: forks the script's process, which then need not import torch; a fresh interpreter without one.

    Raises:
        UsageError: there is no such script; it fails by itself, with its own exception and line; it takes no step of
            an optimizer, too few of them, or starts its own ranks.

    Example:
        >>> import tempfile, pathlib
        >>> script = pathlib.Path(tempfile.mkdtemp()) / "train.py"
        >>> lines = (
        ...     "import torch; model = torch.nn.Linear(4, 2); optimizer = torch.optim.SGD(model.parameters())",
        ...     "for _ in range(20): optimizer.zero_grad(); model(torch.ones(8, 4)).sum().backward(); optimizer.step()",
        ... )
        >>> _ = script.write_text("\n".join(lines))
        >>> profile = profile_script(script, steps=3)
        >>> profile.batch, profile.parameter_bytes, len(profile.gradients), profile.uncut
        (8, 40, 2, 'it is a single layer')
    """
    if steps < FEWEST:
        raise UsageError(f"steps={steps}: the median of {FEWEST} or more is taken")
    if is_module and find_module(str(script)) is None:
        raise UsageError(f"there is no module {script}: check the name, and that it is installed")
    if not is_module and not Path(script).exists():
        raise UsageError(f"there is no script {script}: check the path")
    program = runs.Script(program=str(script), arguments=tuple(args), is_module=is_module)
    order = {"script": " ".join(program.words()), "steps": steps}
    said: list[str] = []
    with (
        tempfile.TemporaryDirectory(prefix="samestep-plan-", ignore_cleanup_errors=True) as folder,
        ProgressLine() as telling,
    ):
        say = progress or telling.say

        def look(where: Path, _: float) -> None:
            latest = [event["text"] for event in journal.read(where / "journals", 0) if event["kind"] == "at"][-1:]
            if latest != said:
                said[:] = latest
                say(said[0])

        say(f"starting {program.program}")
        ended = runs.run(
            program,
            1,
            Path(folder) / "run",
            OBSERVER,
            order,
            threads=threads or threads_per_rank(1),
            still_s=runs.HANG_TIMEOUT_S,
            fork_server=fork_server,
            progress=look,
        )
        return _result(program, ended)


def _result(program: runs.Script, ended: runs.Ended) -> Profile:
    """The profile, if there is one; else why not."""
    if (ended.folder / RESULT).exists():
        return load(ended.folder / RESULT)
    name, events = program.program, journal.read(ended.folder / "journals", 0)
    if (ended.folder / "journals" / journal.SPAWNED).exists():
        raise UsageError(f"{name} starts its own ranks: profile a script that trains in the process it is started in")
    if ended.hung:
        place = runs.stack_positions(ended.folder).get(0)
        raise UsageError(f"{name} stands still{f' at {place}' if place else ''}: see whether `samestep run -n 1` ends")
    if ended.code:
        raise UsageError(f"{name} fails by itself{_reason(ended)}")
    refused = [str(event["why"]) for event in events if event["kind"] == "refused"]
    if refused:
        raise UsageError(f"{name}: {refused[0]}")
    taken = next((int(event["steps"]) for event in events if event["kind"] == "end"), 0)
    if not taken:
        raise UsageError(
            f"{name} takes no step of an optimizer of torch.optim: there is nothing to profile; if it goes on from a "
            "finished training, profile it where there is no checkpoint"
        )
    count = plural(taken, "step")
    raise UsageError(
        f"{name} ends after {count}: a profile takes {FEWEST + 1} or more, let it train on more data or epochs"
    )


def _reason(ended: runs.Ended) -> str:
    """What the launcher blames, as verify tells it, with the line; a message of several lines becomes one."""
    failure: dict[str, Any] | None = ended.failure
    if failure is None or not failure.get("exception"):
        return f", with exit code {ended.code}: {ended.tail(1)}".removesuffix(": ")
    where = f" at {failure['where']}" if failure.get("where") else ""
    said = " ".join(str(failure.get("message") or "").split())[:300]
    return f"{where}: {failure['exception']}: {said}".removesuffix(": ")
