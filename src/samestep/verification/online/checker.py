"""The observer behind `samestep run --check`: writes this rank's summaries; on rank 0, compares and prints.

It changes nothing of what the script computes: no dropout is switched off, no random number drawn, no collective added.
Should it fail by itself, it says so, and is silent from then on.
"""

from __future__ import annotations

import functools
import json
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from samestep.files import open_private, write_private
from samestep.instrument import collectives, dataloader, training
from samestep.instrument.callbacks import Callbacks, LoaderPass, PassIterator, subscribe
from samestep.instrument.collective_call import CollectiveCall
from samestep.instrument.patch import call_site
from samestep.launch.rank.excepthook import write_stderr
from samestep.launch.rank.observers import Observer, RankContext
from samestep.rankenv import variable
from samestep.text import plural
from samestep.verification.findings import Finding
from samestep.verification.journal import Event
from samestep.verification.online import exchange
from samestep.verification.online.exchange import FinalSummary, StepSummary, SummaryDetail, SummaryExchange
from samestep.verification.online.outcome import CHECKED, FINDINGS, NOT_CHECKED
from samestep.verification.online.policy import OnlineRules
from samestep.verification.online.samples import TrainedSamples, sampler_of
from samestep.verification.online.tracking import KEPT, CallStream, EventStream, TrackedModels, TrackedOptimizer
from samestep.verification.recording.optimizers import rates_of
from samestep.verification.report import finding_lines


def disable_on_error(method: Callable[..., None]) -> Callable[..., None]:
    """A mistake of the checker shall not end a training."""

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
    def begin(self, context: RankContext) -> None:
        self.rank = context.rank
        self.is_off = False
        self._exchange: SummaryExchange | None = None
        self._rules: OnlineRules | None = None
        self._size = 1
        self._found = 0
        self._window = 0  # steps of all optimizers
        self._optimizers: list[TrackedOptimizer] = []
        self._models = TrackedModels()
        self._calls = CallStream()
        self._scalers = EventStream("scaler", "scale", "skipped", "where")
        self._schedules = EventStream("scheduler", "event", "where")
        self._recent: deque[Event] = deque(maxlen=KEPT)  # of this step, that gradients are averaged by
        self._passes: dict[tuple[str, int], TrainedSamples] = {}
        self._is_evaluating = False
        subscribe(
            self,
            *(training.optimizers, training.schedules, training.wrappers, training.synchronisation, training.modes),
            *(training.backward_passes, dataloader.passes, collectives.collectives),
        )

    # --- models and communication ----------------------------------------------------------------

    @disable_on_error
    def on_wrap(self, kind: str, model: Any, where: str, ranks: list[int] | None = None) -> None:
        """Notes what a wrapper promises."""
        self._models.add(kind, model, where)

    def on_comm_hook(self, name: str, where: str) -> bool:
        """Gradients that a hook reduces may differ between ranks for a while."""
        self._models.is_hooked = True
        return False

    @disable_on_error
    def before_collective(self, call: CollectiveCall) -> None:
        self._calls.note(call, self._window)

    def before_backward(self, root: Any, where: str) -> None:
        self._note("backward", where=where)

    @disable_on_error
    def on_event(self, kind: str, **fields: Any) -> None:
        if kind in {"forward", "no_sync"}:
            self._models.synchronises = fields.get("synchronises", self._models.synchronises)
            self._note(kind, **fields)
            self._note_cut(fields.get("rows", 0))
        elif kind == "mode":
            self._is_evaluating = not fields["training"]
            if self._is_evaluating:  # it does not train on what was yielded
                for one in self._passes.values():
                    one.waiting.clear()
        elif kind == "scheduler":
            self._schedules.add("", self._window, fields["where"])
        elif kind == "scaler":
            scale, skipped = fields["scale"], fields["skipped"]
            self._scalers.add(f"{scale} {skipped}", scale, skipped, fields["where"])

    def _note_cut(self, rows: int) -> None:
        """Says nothing of a pass each of whose batches all ranks load, and cut by themselves."""
        cut = [name for name, one in self._passes.items() if one.is_cut_to(rows, self._size)]
        for name in cut:
            del self._passes[name]

    def _note(self, kind: str, **fields: Any) -> None:
        self._recent.append({"kind": kind, "window": self._window, **fields})

    # --- data ------------------------------------------------------------------------------------

    @disable_on_error
    def on_pass(self, loader_pass: LoaderPass, own: PassIterator) -> None:
        """Looks at passes over data of which every sample should come once; they stay the script's own."""
        if (sampler := sampler_of(loader_pass.loader)) is not None:
            self._passes[loader_pass.key, loader_pass.number] = TrainedSamples(loader_pass, sampler)

    @disable_on_error
    def on_batch(self, loader_pass: LoaderPass | None, indices: Any, value: Any) -> None:
        """Notes the samples of a batch that may be trained on."""
        import torch

        if loader_pass is None or indices is None or self._is_evaluating or not torch.is_grad_enabled():
            return
        try:
            if (known := self._passes.get((loader_pass.key, loader_pass.number))) is not None:
                known.add(indices, value)
        except Exception:  # noqa: BLE001  (whatever a batch is: nothing is said of this pass)
            del self._passes[loader_pass.key, loader_pass.number]

    @disable_on_error
    def on_pass_end(self, loader_pass: LoaderPass) -> None:
        """What no step has used is not trained on."""
        if (known := self._passes.get((loader_pass.key, loader_pass.number))) is not None:
            known.waiting, known.is_over = [], True

    # --- steps -----------------------------------------------------------------------------------

    @disable_on_error
    def on_optimizer(self, optimizer: Any, where: str) -> None:
        self._tracked(optimizer, where)

    def _tracked(self, optimizer: Any, where: str = "") -> TrackedOptimizer:
        if "samestep_number" not in optimizer.__dict__:
            optimizer.samestep_number = len(self._optimizers)
            self._optimizers.append(TrackedOptimizer(optimizer.samestep_number, where))
        return self._optimizers[int(optimizer.samestep_number)]

    @disable_on_error
    def before_step(self, optimizer: Any) -> None:
        tracked = self._tracked(optimizer)
        if self._exchange is None and not self._join():
            return
        for one in self._passes.values():
            one.train()
        if not self._models.is_synchronised:
            tracked.note_spot(optimizer)
        if tracked.steps % exchange.EVERY == 0 and tracked.number < exchange.MAX_OPTIMIZERS:
            self._write(optimizer, tracked)

    @disable_on_error
    def after_step(self, optimizer: Any) -> None:
        self._tracked(optimizer).steps += 1
        self._window += 1
        self._recent.clear()
        if self._rules is not None:
            self._look()

    def _join(self) -> bool:
        """Whether there is a process group by now, with others in it."""
        self._exchange = SummaryExchange.of_process_group()
        if self._exchange is None:
            return False
        import torch.distributed as dist

        self.rank, self._size = dist.get_rank(), dist.get_world_size()
        self._rules = OnlineRules(self._size) if self.rank == 0 else None
        return True

    def _write(self, optimizer: Any, tracked: TrackedOptimizer) -> None:
        parameters, gradients, values = tracked.values(optimizer)
        models, streams = self._models, [self._calls, self._scalers, self._schedules, self._models.wraps]
        rates = rates_of(optimizer)
        summary = StepSummary(
            optimizer=tracked.number,
            step=tracked.steps,
            steps=[one.steps for one in self._optimizers],
            rates=rates,
            streams={one.kind: one.state for one in streams},
            is_not_comparable=models.is_not_comparable,
            is_wrapped=models.is_wrapped,
            is_data_parallel=models.is_data_parallel,
            is_synchronised=models.is_synchronised,
            passes=[one.summary() for one in self._passes.values() if one.trained],
            **values,
        )
        self._passes = {name: one for name, one in self._passes.items() if not one.is_over}
        micro = sum(event["kind"] == "backward" for event in self._recent)
        step = {"event": tracked.steps, "optimizer": tracked.number, "window": self._window, "micro": micro}
        where = call_site(sys._getframe(1))  # noqa: SLF001
        events = [
            {"kind": "begin", "size": self._size},
            *(event for one in (*streams, self._calls.within) for event in one.events),
            *({"kind": "optimizer", "number": one.number, "where": one.where} for one in self._optimizers),
            *self._recent,
            {"kind": "step", "where": where, "rates": rates, **step},
        ]
        assert self._exchange is not None
        self._exchange.send(summary, SummaryDetail(parameters=parameters, gradients=gradients, events=events))

    # --- on rank 0 -------------------------------------------------------------------------------

    def _look(self) -> None:
        assert self._exchange is not None
        assert self._rules is not None
        received = self._exchange.received()
        if received is not None:
            summaries, details = received
            self._report(self._rules.step(summaries, details))
            self._exchange.free(summaries)

    def _report(self, findings: list[Finding]) -> None:
        for finding in findings:
            self._found += 1
            write_stderr("\n".join(["samestep: --check: found while it trains", *finding_lines(finding), ""]))
            if (folder := variable("SAMESTEP_RUN_DIR")) is not None:
                with open_private(Path(folder) / FINDINGS, "a", encoding="utf-8") as file:
                    file.write(json.dumps(finding.as_json()) + "\n")

    @disable_on_error
    def end(self, error: BaseException | None) -> None:
        """Compares what is left, and says what came of it all."""
        if self._exchange is None:
            return
        self.is_off, steps = False, [one.steps for one in self._optimizers]
        well = error is None or (isinstance(error, SystemExit) and not error.code)
        spots = {str(one.number): one.last_spot() for one in self._optimizers}
        where = "" if not self._optimizers else self._optimizers[0].where
        try:
            ends = self._exchange.exchange_final(FinalSummary(well=well, steps=steps, where=where, spots=spots))
        except Exception:  # noqa: BLE001  (the store may have gone with rank 0)
            return
        if self._rules is None:
            return
        for _ in range(2 * exchange.MAX_OPTIMIZERS):  # the summaries that have come meanwhile
            self._exchange.poll_now()
            self._look()
        if ends is not None:
            self._report(self._rules.final(ends))
        if (folder := variable("SAMESTEP_RUN_DIR")) is not None:
            counts = json.dumps({"ranks": self._size, "steps": max(steps, default=0)})
            write_private(Path(folder) / CHECKED, counts + "\n")
        found = "nothing found" if not self._found else plural(self._found, "finding")
        counted = f"{plural(max(steps, default=0), 'step')} of {plural(self._size, 'rank')}"
        write_stderr(f"samestep: --check: {found} in {counted}\nsamestep: --check: not checked: {NOT_CHECKED}\n")
