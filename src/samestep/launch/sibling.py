"""A process among those that somebody else has started for one run, and who may be one of them.

torchrun tells its agents apart by their hosts' names, and takes whatever each was told to run.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.launch.meeting import rendezvous_path
from samestep.launch.wire import new_token
from samestep.rankenv import RankVariables

__all__: list[str] = []

JOIN_TIMEOUT_S = 300.0  # seconds for agents that somebody else starts; a queue may start hosts one by one
ANY_ADDRESS = "0.0.0.0"  # noqa: S104  (the others must reach it)
SHOWN = 60  # characters of a command that a message repeats


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """One of `count` processes that somebody else has started; number 0 leads.

    They meet at `address` and `port`, or through a file; `named` is how a person has written that, and `bind` the
    address at which number 0 listens. All were started with the same `program`; `launcher` is what has started them,
    in the words of samestep.rankenv, None where somebody has by hand.
    """

    index: int
    count: int
    address: str | None = None
    port: int = 0
    token: str = ""
    file: Path | None = None
    patience: float = JOIN_TIMEOUT_S
    launcher: str | None = None
    named: str = ""
    bind: str = ANY_ADDRESS
    program: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """What the processes of this run call each other."""
        return "node" if self.launcher is None else "task"

    @property
    def where(self) -> str:
        """Where number 0 waits, as a person knows it."""
        lost = self.address is not None and self.bind != ANY_ADDRESS and self.address not in self.named
        return f"{self.named} ({self.address}, which only this host can reach)" if lost else self.named

    @property
    def command(self) -> dict[str, str]:
        """What this process was told to run: a digest, and so much of it as a message shows."""
        text = shlex.join(self.program)
        short = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
        return {"program": hashlib.sha256(repr(self.program).encode()).hexdigest(), "command": short}

    def objection(self, about: Mapping[str, Any]) -> str | None:
        """Returns why what an agent has told of itself makes it none of this run; None where it is one."""
        number = about.get("index")
        if not isinstance(number, int) or not 0 < number < self.count:
            return f"{self.word} {number} is none of 1 to {self.count - 1}: give each host a --node-rank of its own"
        if about.get("program", self.command["program"]) != self.command["program"]:
            return (
                f"{self.word} {number} was started with `{about.get('command')}` and {self.word} 0 with "
                f"`{self.command['command']}`: give the same command on all"
            )
        return None


def node_spec(told: RankVariables, patience: float = JOIN_TIMEOUT_S, program: Sequence[str] = ()) -> NodeSpec:
    """Returns this process's place among the tasks of an srun or mpiexec."""
    file, token = rendezvous_path(told), new_token()
    return NodeSpec(
        index=told.rank,
        count=told.size,
        file=file,
        token=token,
        patience=patience,
        launcher=told.source,
        named=str(file),
        program=tuple(program),
    )
