"""The observer behind `samestep run --check`: writes this rank's letters, and on rank 0 compares and tells.

It changes nothing of what the script computes: no dropout is switched off, no random number drawn, no collective added.
Should it fail by itself, it says so, and is silent from then on.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.launch.imports import when_imported
from samestep.launch.noting import call_site
from samestep.launch.observers import Observer, RankContext
from samestep.launch.telling import write_stderr
from samestep.paths import open_private, write_private
from samestep.rankenv import variable
from samestep.verification.checking.calls import Calls
from samestep.verification.checking.judge import Judge
from samestep.verification.checking.letters import EVERY, MOST_OPTIMIZERS, Detail, Farewell, Letter
from samestep.verification.checking.loaders import Loaders
from samestep.verification.checking.outcome import CHECKED, FINDINGS
from samestep.verification.checking.post import Post
from samestep.verification.checking.subjects import Subject, Wrapping
from samestep.verification.findings import Finding
from samestep.verification.judging.words import plural
from samestep.verification.text import finding_lines
from samestep.verification.watching import training
from samestep.verification.watching.listener import Callbacks

__all__: list[str] = []


def _safely(method: Callable[..., None]) -> Callable[..., None]:
    """A mistake of ours shall not end a training."""

    @functools.wraps(method)
    def call(self: Checker, *args: Any, **kwargs: Any) -> None:
        if self.is_off:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  (whatever it is: the training is not to blame)
            self.is_off = True
            write_stderr(
                f"samestep: --check: rank {self.rank} is not checked from here on: {type(error).__name__}: {error}\n"
            )

    return call


class Checker(Observer, Callbacks):
    """Watches one rank."""

    def begin(self, seat: RankContext) -> None:
        """Watches everything from now on."""
        self.rank = seat.rank
        self.is_off = False
        self._post: Post | None = None
        self._judge: Judge | None = None
        self._told = 0
        self._size = 1
        self._calls = Calls()
        self._loaders = Loaders()
        self._wrapping = Wrapping()
        self._subjects: list[Subject] = []
        self._schedules = (0, "")
        self._scaler: tuple[list[float], str] = ([], "")
        training.watch(self, sparing=True)
        when_imported("torch.utils.data.dataloader", self._loaders.watch)
        when_imported("torch.distributed", self._calls.watch)

    @_safely
    def wrapped(self, kind: str, model: Any, where: str, ranks: list[int] | None = None) -> None:
        """Notes what a wrapper promises."""
        del ranks
        self._wrapping.add(kind, model, where)

    def hooked(self, name: str, where: str) -> bool:
        """Gradients that a hook reduces may differ between ranks for a while."""
        del name, where
        self._wrapping.is_hooked = True
        return False

    def told(self, kind: str, **fields: Any) -> None:
        """Counts."""
        if kind == "forward":
            self._wrapping.is_synchronised = fields["synchronises"]
        elif kind == "mode":
            self._loaders.note_mode(training=fields["training"])
        elif kind == "scheduler":
            self._schedules = (self._schedules[0] + 1, fields["where"])
        elif kind == "scaler":
            calls, skips = self._scaler[0][:2] or (0, 0)
            told = [calls + 1, skips + bool(fields["skipped"]), fields["scale"]]
            self._scaler = (told, fields["where"])

    @_safely
    def optimizer_made(self, optimizer: Any, where: str) -> None:
        """Numbers it."""
        self._subject(optimizer, where)

    def _subject(self, optimizer: Any, where: str) -> Subject:
        if "samestep_number" not in optimizer.__dict__:
            optimizer.samestep_number = len(self._subjects)
            optimizer.samestep_steps = 0
            self._subjects.append(Subject(optimizer.samestep_number, where))
        return self._subjects[int(optimizer.samestep_number)]

    @_safely
    def before_step(self, optimizer: Any) -> None:
        """Writes a letter, when it is time."""
        import torch

        if torch.compiler.is_compiling():
            return
        subject = self._subject(optimizer, "")
        if self._post is None and not self._joins():
            return
        self._loaders.note_step()
        if not self._wrapping.is_together:
            subject.probe(optimizer)
        if optimizer.samestep_steps % EVERY == 0 and subject.number < MOST_OPTIMIZERS:
            self._write(optimizer, subject)

    @_safely
    def after_step(self, optimizer: Any) -> None:
        """Counts the step; rank 0 looks for letters."""
        import torch

        if torch.compiler.is_compiling():
            return
        self._subject(optimizer, "").steps += 1
        optimizer.samestep_steps += 1
        if self._judge is not None:
            self._look()

    def _joins(self) -> bool:
        """Whether there is a process group by now, with others in it."""
        self._post = Post.of_process_group()
        if self._post is None:
            return False
        import torch.distributed as dist

        self.rank, self._size = dist.get_rank(), dist.get_world_size()
        self._judge = Judge(self._size) if self.rank == 0 else None
        return True

    def _write(self, optimizer: Any, subject: Subject) -> None:
        parameters, gradients, values = subject.values(optimizer)
        letter = Letter(
            optimizer=subject.number,
            step=optimizer.samestep_steps,
            where=call_site(_frame()),
            steps=[one.steps for one in self._subjects],
            rates=[float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
            schedules=self._schedules[0],
            scheduled=self._schedules[1],
            scaler=self._scaler[0],
            scaled=self._scaler[1],
            calls=[self._calls.count, self._calls.digest],
            order=self._wrapping.order,
            made=self._wrapping.where or subject.where,
            is_foreign=self._wrapping.is_foreign,
            is_wrapped=self._wrapping.is_wrapped,
            is_dealt=self._wrapping.is_dealt,
            is_together=self._wrapping.is_together,
            passes=self._loaders.told(),
            **values,
        )
        names, calls = self._wrapping.names, self._calls.last()
        assert self._post is not None
        self._post.send(letter, Detail(parameters=parameters, gradients=gradients, names=names, calls=calls))

    def _look(self) -> None:
        assert self._post is not None
        assert self._judge is not None
        received = self._post.received()
        if received is not None:
            letters, details = received
            self._tell(self._judge.letters(letters, details))
            self._post.forget(letters)

    def _tell(self, findings: list[Finding]) -> None:
        for finding in findings:
            self._told += 1
            write_stderr("\n".join(["samestep: --check: found while it trains", *finding_lines(finding), ""]))
            if (folder := variable("SAMESTEP_RUN_DIR")) is not None:
                with open_private(Path(folder) / FINDINGS, "a", encoding="utf-8") as file:
                    file.write(json.dumps(finding.as_json()) + "\n")

    @_safely
    def end(self, error: BaseException | None) -> None:
        """Compares what is left, and says what came of it all."""
        if self._post is None:
            return
        self.is_off, steps = False, [one.steps for one in self._subjects]
        well = error is None or (isinstance(error, SystemExit) and not error.code)
        probes = {str(one.number): one.last_probe() for one in self._subjects}
        where = "" if not self._subjects else self._subjects[0].where
        try:
            ends = self._post.part(Farewell(well=well, steps=steps, where=where, probes=probes))
        except Exception:  # noqa: BLE001  (the store may have gone with rank 0)
            return
        if self._judge is None:
            return
        self._rest()
        if ends is not None:
            self._tell(self._judge.farewells(ends))
        if (folder := variable("SAMESTEP_RUN_DIR")) is not None:
            told = json.dumps({"ranks": self._size, "steps": max(steps, default=0)})
            write_private(Path(folder) / CHECKED, told + "\n")
        found = "nothing found" if not self._told else plural(self._told, "finding")
        write_stderr(
            f"samestep: --check: {found} in {plural(max(steps, default=0), 'step')} of {plural(self._size, 'rank')}\n"
        )

    def _rest(self) -> None:
        """The letters that have come meanwhile."""
        assert self._post is not None
        for _ in range(2 * MOST_OPTIMIZERS):
            self._post.hurry()
            self._look()


def _frame() -> Any:
    import sys

    return sys._getframe(2)  # noqa: SLF001
