"""Whether a run was the same training that one process would have done, as far as anybody has looked.

--check found an error       different
--check found none           the ranks agree; that N of them train as one, `samestep verify` proves
nobody looked                nothing is known
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from samestep.reporting.record import Event, Run
from samestep.text import escape_control, join_and, plural

__all__: list[str] = []

MOST_RANKS = 8  # that are started for a proof on one machine


@dataclass(frozen=True)
class Sameness:
    """What is known of it.

    Attributes:
        verdict: in a word.
        sentence: in one.
        command: that would say more.
    """

    verdict: Literal["different", "agrees", "unchecked"]
    sentence: str
    command: str


def sameness(run: Run) -> Sameness:
    """Returns what is known."""
    command = verify_command(run.about)
    errors = [finding for finding in run.findings if finding.get("severity") == "error"]
    notes = len(run.findings) - len(errors)
    if errors:
        codes = join_and(list(dict.fromkeys(escape_control(each.get("code")) for each in errors)))
        return Sameness("different", f"No: --check found {plural(len(errors), 'error')} ({codes}).", command)
    steps = (run.checked or {}).get("steps")
    if not notes and (run.checked is None or steps == 0):
        what = "Nothing was checked" if run.is_over else "Not known yet (--check tells at the end)"
        return Sameness("unchecked", f"{what}: `{command}` says whether N ranks train as one.", command)
    over = f" over {plural(steps, 'step')}" if isinstance(steps, int) else ""
    besides = f" but {plural(notes, 'declared difference')}" if notes else ""
    return Sameness(
        "agrees",
        f"The ranks agree: --check compared them with each other{over} and found nothing{besides}. "
        f"Whether they train as one process would, `{command}` says.",
        command,
    )


def verify_command(about: Event) -> str:
    """Returns what a person types to have it proved.

    >>> verify_command({"command": ["train.py", "--name", "a b"], "ranks": 4})
    "samestep verify -n 4 train.py --name 'a b'"
    """
    command, ranks = about.get("command"), about.get("ranks")
    words = [escape_control(word) for word in command] if isinstance(command, list) and command else ["train.py"]
    count = ranks if isinstance(ranks, int) and 2 <= ranks <= MOST_RANKS else 2
    module = ["-m"] if about.get("module") is True else []
    return shlex.join(["samestep", "verify", "-n", str(count), *module, *words])
