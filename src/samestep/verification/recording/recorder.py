"""The observer that records a rank, and changes nothing in what it does but its dropout and its autocast.

A window is what lies between two optimizer steps. Digests are kept of every step, values of few windows. The rank is
ended with code 0 after so many steps: all ranks at the same step, so no rank waits for another.
"""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pickle import PicklingError
from typing import TYPE_CHECKING, Any

from samestep.instrument.callbacks import LoadedBatch, LoaderPass, PassIterator
from samestep.instrument.collective_call import CollectiveCall
from samestep.instrument.patch import call_site
from samestep.instrument.training import watch_bare_forward
from samestep.launch.rank.observers import RankContext
from samestep.rankenv import variable
from samestep.runtime.digest import digest, digest_of_bytes
from samestep.verification.journal import SPAWNED
from samestep.verification.recording.chance import MOST_BEFORE, ORDERING, begins_parameters, keep, note_order
from samestep.verification.recording.compressing import Compressing
from samestep.verification.recording.containers import mapped, named_tensors
from samestep.verification.recording.evaluations import STATISTICS
from samestep.verification.recording.limit import Limit, Pass
from samestep.verification.recording.naming import bare, batch_norms, made_at, named, parameters_of, roots
from samestep.verification.recording.optimizers import digests, held, norms_of, rates_of, settings_of
from samestep.verification.recording.restarting import kill, kill_once_saved, may_load
from samestep.verification.recording.script_observer import ScriptObserver, StopRecording

if TYPE_CHECKING:
    from samestep.verification.recording.datasets import Held

SAMPLED = (0, 1, 2, 16, 64)  # windows whose values are kept; what follows the parameters needs 1 and 2
MOST_ENDS = 2  # and so many that end a pass over the data, which may be shorter
LOCAL_NORMS = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d"}  # whose statistics are of a rank's samples
MOST_EVALUATED = 4  # and so many in which an evaluation runs
MOST_AVERAGED = 8  # and so many uses of models that no optimizer steps, whose parameters are told
MOST_REPLICAS = 16  # looks at copies of a model while no step is seen
_MOST_LOCAL = 64  # local tensors of replicated DTensors, in the first window
_MASKED, _MOST_MASKS = 4, 16  # windows, and dropout masks in each, that are recorded where parameters are sharded
_CUT = 3  # windows in which the rows that models get of loaded batches are recorded
_NOISY = 4  # and so many batches of a pass for which a dataset's own generators are looked at
_MOST_SEEDS = 1 << 12  # of generators
WHOLE = 2  # passes over each loader whose samples are all told


class Recorder(ScriptObserver):
    """Records one rank as SAMESTEP_VERIFY says, a JSON object: "folder", "steps", and "passes" to end early."""

    def begin(self, context: RankContext) -> None:
        order = json.loads(variable("SAMESTEP_VERIFY") or "{}")
        self.rank = context.rank
        folder = Path(order["folder"])
        folder = folder / SPAWNED if context.spawned else folder
        self.open_trace(order, folder, context, lambda: None if self._is_fed else self.window)
        self.inputs.fed = lambda: self.window if self._is_fed and self.window < _CUT else None  # a script may cut them
        self._limit = Limit(order["steps"], order.get("passes", 0))
        self._open: dict[Pass, PassIterator] = {}  # passes that are not over
        self._lengths: dict[str, int | None] = {}  # of loaders
        self._whole: Counter[str] = Counter()  # loader -> passes whose samples are all told
        self._sampled = False
        self._local_norms = 0  # modules that normalise by a rank's own samples
        self._ends = 0
        self._evaluated = 0
        self._last_micro = 1
        self._has_trained = False  # a model was called with gradients in this window
        self._looks = 0  # windows that were kept since a model was called without
        self._unit = 0.0  # the unit roundoff of the coarsest leaf of this window's backward passes
        self._own: Any = None  # an OwnGradients, once an optimizer is there
        self.compressing = Compressing(self.journal, first=context.rank == 0, wanted=lambda: self._sampled)
        self._replicas: list[weakref.ref[Any]] = []  # models in DistributedDataParallel
        self._replicas_reported = 0
        self._split: list[tuple[weakref.ref[Any], str]] = []  # models in DataParallel, which may be frozen later
        self._datasets: dict[str, Any] = {}
        self._dropped_in = -1
        self._local_tensors = 0
        self._masks = 0  # of the window at hand that were looked at
        self._loaded: str | None = None
        self._given_weights: list[weakref.ref[Any]] = []  # models that a state was given to since then
        self._loaded_buffers: dict[str, str] = {}
        self._averaged: dict[int, dict[str, Any] | None] = {}  # model -> its event of this window; None: several values
        self._averages_reported = 0
        self._loaded_averaged: dict[str, str] = {}
        self._collected_at = -1  # the window in which unreferenced models were last collected
        self._evaluates: str | None = None  # the evaluation whose parameters were written last
        self._loaded_at: str | None = None  # where parameters were loaded since the last step
        self._is_fed = False  # a DataLoader has yielded what is trained on
        self._draws_samples = False  # random numbers were drawn while a batch was loaded, and not for their order
        self._seeds: set[str] = set()
        self._drawn_between = -1  # the last window before which random numbers were drawn between two passes
        self._loads = ""  # the key of the loader that loads
        self._is_over = False  # the pass at hand has yielded all it has, and its last batch may still be trained on
        if self.order.get("everywhere"):
            self.inputs.keeps = lambda: self.window if self._sampled else None
        self.install_patches()

    def end(self, error: BaseException | None) -> None:
        self._tell_averaged()
        if error is None or isinstance(error, SystemExit):
            for key, (dataset, collate) in self._datasets.items():
                self._tell_dataset(key, dataset, collate)
        if self.rank == 0 and may_load():
            self.journal.write("may_load")
        super().end(error)

    def _note_dataset(self, epoch: LoaderPass) -> None:
        """One that loads in this process is looked at now; one that workers load, when they are gone."""
        if epoch.number == 0 and epoch.loader.num_workers:
            self._datasets[epoch.key] = epoch.loader.dataset, epoch.loader.collate_fn
        elif epoch.number == 0:
            self._tell_dataset(epoch.key, epoch.loader.dataset, epoch.loader.collate_fn)

    def _tell_dataset(self, key: str, dataset: Any, collate: Any) -> None:
        from samestep.verification.recording.datasets import fingerprint, mixes

        self.journal.write("fingerprint", key=key, samples=fingerprint(dataset), mixed=mixes(dataset, collate))

    # --- data --------------------------------------------------------------------------------

    def on_pass(self, epoch: LoaderPass, own: PassIterator) -> Iterator[Any]:
        """Writes down what a pass yields; one that is to end early yields nothing more."""
        from samestep.verification.recording.datasets import described

        name = epoch.key, epoch.number
        self._begin_pass(name, own)
        self.evaluations.begin_pass(epoch.key, epoch.number)
        about = described(epoch.loader)
        self.journal.write("pass", key=epoch.key, number=epoch.number, where=epoch.where, **about)
        self._lengths[epoch.key] = about["length"]
        self.note_chosen(epoch)
        self._note_dataset(epoch)
        yielded = 0
        noise = self._noise_of(epoch)
        self._draws_samples = False
        while not (is_cut := self._limit.ends(name)) and (batch := self._next(own, epoch.key)) is not None:
            self._note_batch(batch)
            if self._draws_samples and not yielded:
                self.journal.write("draws_samples", key=epoch.key, number=epoch.number)
            if noise is not None and yielded < _NOISY and (after := self._noise_of(epoch)) != noise:
                about = {"index": yielded, "state": noise.state, "after": after and after.state, "where": noise.where}
                self.journal.write("noise", key=epoch.key, number=epoch.number, **about)
                noise = after
            yielded += 1
            yield self.given(batch.value)
        self._is_over = True
        self.evaluations.passed(epoch.key, epoch.number)
        if is_cut:
            self._tell_rest(name)
        elif self._open.pop(name, None) is not None:
            self._whole[epoch.key] += 1
        self.journal.write("passed", key=epoch.key, number=epoch.number, cut=yielded if is_cut else None)

    def _next(self, own: PassIterator, key: str) -> LoadedBatch | None:
        self._loads = key
        return self.next_of(own)

    def _noise_of(self, epoch: LoaderPass) -> Held | None:
        """The generators that a dataset which is loaded in this process holds itself."""
        from samestep.verification.recording.datasets import held_by

        is_seen = not epoch.loader.num_workers and hasattr(type(epoch.loader.dataset), "__getitem__")
        return held_by(epoch.loader.dataset) if is_seen else None

    def _begin_pass(self, name: Pass, own: PassIterator) -> None:
        """Of a loader whose passes the script leaves before their end, the samples that it leaves out tell nothing."""
        for other in [other for other in self._open if other[0] == name[0]]:
            del self._open[other]
            self._whole[name[0]] = WHOLE
        self._open[name] = own

    def _tell_rest(self, name: Pass) -> None:
        """Writes down which samples would follow in a pass that goes no further."""
        own = self._open.pop(name, None)
        if own is None or self._whole[name[0]] >= WHOLE:
            return
        self.is_loading, self._loads = True, name[0]
        try:
            rest = own.rest(self._lengths.get(name[0]))
        except Exception:  # noqa: BLE001  (a sampler's own, which the script would have met later)
            return
        finally:
            self.is_loading = False
        if rest is not None:
            self._whole[name[0]] += 1
            self.journal.write("rest", key=name[0], number=name[1], indices=rest)

    def _note_batch(self, batch: LoadedBatch) -> None:
        import torch

        from samestep.verification.recording import rows

        training = torch.is_grad_enabled()  # or an evaluation without no_grad: whether it trains will be seen
        self.evaluations.batch(batch.loader_pass.key, batch.loader_pass.number, batch.index, gradients=training)
        self._is_over = False
        evaluating = self.evaluations.lasts  # gradients may be off only around the model
        if training and not evaluating:
            self._is_fed = True
            self._limit.yielded((batch.loader_pass.key, batch.loader_pass.number))
        self.open_window(evaluating=evaluating, ends=not evaluating and self._ends_pass(batch))
        requested = len(batch.indices or ())
        room, number = not self.journal.is_full, self._keep_batch(batch.value) if training else None
        self.journal.write(
            "batch",
            key=batch.loader_pass.key,
            number=batch.loader_pass.number,
            index=batch.index,
            indices=batch.indices,
            rows=rows.row_digests(batch.value, requested, loaded=True),
            size=rows.count(batch.value, requested) or requested,
            kept=number,
            room=room,
            training=training,
            window=self.window,
        )

    def _keep_batch(self, value: Any) -> int | None:
        """None too where a batch holds what cannot be saved: a function, a lock, a file."""
        with contextlib.suppress(AttributeError, TypeError, PicklingError):
            return self.journal.keep(mapped(value, lambda one: one.detach().cpu().clone()))
        return None

    # --- windows -----------------------------------------------------------------------------

    def _ends_pass(self, batch: LoadedBatch) -> bool:
        """Whether the window that begins with this batch will, as far as the last one tells, be the pass's last."""
        length = self._lengths[batch.loader_pass.key]
        return length is not None and batch.index + self._last_micro >= length

    def forwarding(self, model: Any, data: tuple[Any, ...]) -> None:
        """A window begins here, at the latest, whose batch was loaded before the last step, or that is evaluated in."""
        import torch

        super().forwarding(model, data)
        if torch.is_grad_enabled():
            if (model.training and self._is_over) or not (self._is_fed or self.evaluations.lasts):
                self.open_window(ends=self._is_over)
            self._has_trained = True
        elif self.window and self.optimizers.all and not self._has_trained and not self.micro:
            if self.evaluations.may_run:
                self.open_window()
            if self.is_open and not self._sampled and self._looks < MOST_EVALUATED:
                self._looks += 1
                self._sampled = True
                self._note_window()
        if not torch.is_grad_enabled() and (phase := self.evaluations.phase) not in (None, self._evaluates):
            self._evaluates = phase
            where = call_site(_frame())
            about = {"parameters": self.optimizers.digests()["parameters"], "loaded": self._loaded_at, "where": where}
            self.journal.write("evaluates", phase=phase, **about)

    def uses_untrained(self, model: Any) -> None:
        """Keeps its parameters in mind, in a few windows: of an average of the weights, or a teacher.

        One that is used with several values in one window is neither: a copy that a script perturbs, say.
        """
        if not self.window or self._averages_reported >= MOST_AVERAGED:
            return
        known = self._averaged.get(id(model), {})
        if known is None or not (parameters := self.optimizers.averaged(model)):
            return
        reported = digests(parameters)
        if not known:
            about = {"window": self.window, "digests": reported, "where": call_site(_frame())}
            self._averaged[id(model)] = about
        elif known["digests"] != reported:
            self._averaged[id(model)] = None

    def _tell_averaged(self) -> None:
        for about in filter(None, self._averaged.values()):
            self._averages_reported += 1
            self.journal.write("averaged", **about)
        self._averaged.clear()

    def open_window(self, *, evaluating: bool = False, ends: bool = False) -> None:
        """Keeps the values that it begins with, if it is one of those that are looked at."""
        if self.is_open or not self.optimizers.all:
            return
        self.is_open = True
        self._ends += ends
        self._evaluated += evaluating
        late = (ends and self._ends <= MOST_ENDS) or (evaluating and self._evaluated <= MOST_EVALUATED)
        is_requested = self.order.get("keep_all") or self.window in self.order.get("keep", ())
        self._sampled = self.window in SAMPLED or late or bool(is_requested)
        if self._loaded is not None:
            self._loaded_buffers = self.optimizers.digests()["buffers"]  # the forward will change them
            self._collected_at = -1  # the script may have made its model anew since it has saved
            self._loaded_averaged = self._averages()
        if self.window == 0:
            groups = [group for optimizer in self.optimizers.all for group in optimizer.param_groups]
            numbers = sum(one.numel() for group in groups for one in group["params"])
            counts = [(len(norms), local_norms_in(norms)) for norms in batch_norms()]
            are_local = [local > 0 for size, local in counts for _ in range(size)]
            self._local_norms = sum(local for _, local in counts)
            norms = {"norms": are_local, "local_norms": self._local_norms}
            are_cut = any(hasattr(one, "_local_tensor") for root in roots() for one in parameters_of(root))
            self.journal.write("start", numbers=numbers, cut=are_cut, **norms, **self.optimizers.digests())
        self._note_window()
        if not evaluating:
            self.trace("forward")

    def _averages(self) -> dict[str, Any]:
        """Digests of the models that no optimizer holds; not of those that only wait to be collected."""
        if self._collected_at != self.window and self.optimizers.untrained():
            self._collected_at = self.window
            gc.collect()
        return digests(self.optimizers.untrained())

    def _keep_own(self, parameters: dict[str, Any]) -> int | None:
        """What this rank's backward passes have brought of the gradients with which an optimizer is about to step."""
        own = None if self._own is None else self._own.of(parameters, self.loss_scale)
        return None if own is None else self.journal.keep(own)

    def _note_window(self) -> None:
        if self._sampled:
            from samestep.verification.recording.own_gradients import OwnGradients

            self._own = self._own or OwnGradients(lambda: self._sampled)
            for optimizer in self.optimizers.all:
                self._own.watch(self.optimizers.parameters(optimizer).values())
        kept = self._keep(self.optimizers.values) if self._sampled else None
        others = digests(self.optimizers.foreign_buffers()) if self._sampled else {}
        buffers = self.journal.keep(self._moving()) if self._sampled and self.rank else None
        self.journal.write(
            "window", number=self.window, sampled=self._sampled, kept=kept, buffers=buffers, others=others
        )

    def _moving(self) -> dict[str, Any]:
        """The buffers of this rank that are no statistics of BatchNorm: a step may move them otherwise on each rank."""
        left_out = STATISTICS if self._local_norms else ()
        return {name: one for name, one in self.optimizers.buffers().items() if not name.endswith(left_out)}

    # --- training ----------------------------------------------------------------------------

    def on_wrap(self, kind: str, model: Any, where: str, ranks: list[int] | None = None) -> None:
        """Writes down the order in which a model's parameters are registered, which DistributedDataParallel trusts."""
        if self.sources is not None:
            self.sources.enter()
        if kind == "DataParallel":
            self._split.append((weakref.ref(model), where))
            return
        if kind == "DistributedDataParallel":
            watch_bare_forward(self, model)
            self._replicas.append(weakref.ref(model))
        self._tell_wrap(kind, model, where, ranks)

    def _tell_wrap(self, kind: str, model: Any, where: str, ranks: list[int] | None = None) -> None:
        from samestep.verification.recording.flat import why_unknown

        self.journal.write(
            "wrap",
            wrapper=kind,
            where=where,
            ranks=ranks,
            names=[name for name, _ in named(model)],
            made=made_at([parameter for _, parameter in named(model)]),
            trained=[name for name, parameter in named(model) if parameter.requires_grad],
            ignored=sorted(map(bare, getattr(model, "parameters_to_ignore", ()))),
            unknown=why_unknown(model),
            model=type(getattr(model, "module", model)).__name__,
            norms=sum("BatchNorm" in type(part).__name__ for part in model.modules()),
            local_norms=local_norms_in(model.modules()),
            unsynchronised=unsynchronised_in(model),
            broadcasts=bool(getattr(model, "broadcast_buffers", False)),
        )

    def tell_trained_splits(self) -> None:
        for known, where in tuple(self._split):
            if (model := known()) is not None and any(one.requires_grad for one in model.parameters()):
                self._tell_wrap("DataParallel", model, where)
                self._split.remove((known, where))

    def on_comm_hook(self, name: str, where: str) -> bool:
        self.journal.write("hook", name=name, where=where)
        return False

    def before_backward(self, root: Any, where: str) -> None:
        """Counts the backward passes of a window."""
        self.tell_trained_splits()
        if root is not None:
            self.begin_backward(root)
        from samestep.verification.recording.graph import scale_of, terms_of, unit_of

        self.evaluations.end()
        self.open_window()
        if self._sampled and root is not None:
            self._unit = max(self._unit, unit_of(root))
        self._note_replicas(where)
        self.micro += 1
        about = {"adds": self.optimizers.hold_gradients(), "terms": terms_of(root), **scale_of(root)}
        self.journal.write("backward", window=self.window, where=where, **about)

    def _note_replicas(self, where: str) -> None:
        """Where no step is seen, the parameters that a wrapper declares to be copies tell whether ranks stay alike."""
        if self.optimizers.all or not self._replicas or self._replicas_reported >= MOST_REPLICAS:
            return
        self._replicas_reported += 1
        self.journal.write("replicas", where=where, parameters=digests(self.replicated()))
        if self.sources is not None:
            self.sources.begin_step()
            self.sources.end_step()

    def replicated(self) -> dict[str, Any]:
        """Returns the parameters, by name, of models in DistributedDataParallel that it does not ignore."""
        models = [one for known in self._replicas if (one := known()) is not None]
        return {
            bare(name): parameter
            for model in models
            for name, parameter in model.module.named_parameters()
            if name not in getattr(model, "parameters_to_ignore", ())
        }

    def after_backward(self) -> None:
        """Writes down how large one gradient is by now: whether somebody divides it before the step."""
        self.journal.write("accumulated", window=self.window, norm=self.optimizers.probe())
        self.compressing.settle(self.window)
        self.end_backward()
        self.trace("gradients")

    def before_step(self, optimizer: Any) -> None:
        import torch

        if self.is_preparing or torch.compiler.is_compiling() or self.leaves_out(optimizer):
            return
        self.on_optimizer(optimizer, "")
        by_hand, is_late = self.optimizers.is_by_hand(optimizer), not self.is_open
        self.open_window()
        self.trace("step")
        if self.sources is not None:
            self.sources.begin_step()
        if by_hand and self._loaded is not None:  # what came back of the state of such code, only its step tells
            self._sampled = True
            self._note_window()
        parameters, gradients = self.optimizers.parameters(optimizer), self.optimizers.gradients(optimizer)
        if self._loaded is not None:
            if by_hand and is_late:
                self._loaded_buffers = {}  # a forward has changed them
            self._note_resumed(optimizer)
        kept = self._keep(lambda: held(gradients), by_all=by_hand) if self._sampled else None
        unheld = self.optimizers.unheld() if self.window <= 1 else []
        self.journal.write(
            "step",
            by_hand=by_hand,
            in_group=torch.distributed.is_available() and torch.distributed.is_initialized(),
            event=self.window,
            optimizer=optimizer.samestep_number,
            window=self.window,
            micro=self.micro,
            where=call_site(_frame()),
            rates=rates_of(optimizer),
            settings=[settings_of(group) for group in optimizer.param_groups],
            gradients=digests(gradients),
            parameters=digests(parameters | self.optimizers.beside(optimizer)),
            probe=self.optimizers.probe(),
            norms=norms_of(gradients),
            orphans=[name for name, _ in unheld],
            left_out=[name for name, is_trained in unheld if is_trained],
            empty_groups=sum(not group["params"] for group in optimizer.param_groups),
            kept=kept,
            own=self._keep_own(parameters) if self._sampled else None,
            unit=self._unit,
        )
        if self._sampled:
            self.compressing.tell(optimizer, self.window, self.loss_scale)

    def _note_resumed(self, optimizer: Any) -> None:
        self.journal.write(
            "resumed",
            path=self._loaded,
            event=self.window,
            optimizers=[one for one in self.optimizers.states() if one["number"] == optimizer.samestep_number],
            buffers=self._loaded_buffers,
            averaged=self._loaded_averaged,
            into_others=self._was_loaded_into_others(optimizer),
            into_trained=self.optimizers.have_trained(optimizer),
        )
        self._loaded = None

    def _was_loaded_into_others(self, optimizer: Any) -> bool:
        """Whether what was loaded went into other models than that of an optimizer, which has not stepped yet."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        given = [model for one in self._given_weights if (model := one()) is not None]
        are_others = all(held.isdisjoint(map(id, model.parameters())) for model in given)
        return bool(given) and are_others and not optimizer.state

    def _keep(self, value: Callable[[], Any], *, by_all: bool = False) -> int | None:
        """Of replicas the first rank's values are enough; of what is cut, or if so ordered, all keep theirs."""
        if self.rank and self.optimizers.are_replicas and not by_all and not self.order.get("everywhere"):
            return None
        return self.journal.keep(value())

    def after_step(self, optimizer: Any) -> None:
        import torch

        if torch.compiler.is_compiling() or not self.ends_step(optimizer):
            return
        if self.sources is not None:
            self.sources.end_step()
        optimizer.samestep_steps += 1
        after = digests(self.optimizers.parameters(optimizer))
        self.journal.write("stepped", event=self.window, optimizer=optimizer.samestep_number, parameters=after)
        if self._sampled:
            kept, evaluations = self._keep(lambda: self.optimizers.updated(optimizer)), optimizer.samestep_evaluations
            carried = self.optimizers.state_digests(optimizer)
            self.journal.write("updated", event=self.window, kept=kept, evaluations=evaluations, carried=carried)
        self.window += 1
        self.trace_samples()
        self._last_micro = self.micro or 1
        self.is_open, self._sampled, self.micro, self.scaler = False, False, 0, None
        self._has_trained, self._loaded_at, self._unit = False, None, 0.0
        self._tell_averaged()
        self.watch_uses()
        self.compressing.forget()
        if self._own is not None:
            self._own.forget()
        begun = self._limit.reached
        is_over = self._limit.stepped(self.optimizers.taken(optimizer, begun))
        if self._limit.reached and not begun:
            self.journal.write("enough", event=self.window)
        if is_over:
            for name in self._limit.fed:
                self._tell_rest(name)
            raise StopRecording(0)
        if self.rank == 0 and self.order.get("killed_at") == optimizer.samestep_steps:
            kill_once_saved(Path(self.order["saves"]), self.journal)
        if self.rank == 0 and self.order.get("killed_behind") == self.window:
            kill(self.journal)

    @classmethod
    def ends_ranks_of(cls, starter: int) -> bool:
        """Of several processes that each start all ranks, the first is enough."""
        return starter > 0

    def on_spawn(self, start: Any, arguments: Any, processes: int) -> bool:
        """Stops there, where another process starts all ranks, too."""
        if self.rank > 0:
            raise StopRecording(0)
        return False

    # --- the rest ----------------------------------------------------------------------------

    def before_collective(self, call: CollectiveCall) -> None:
        if self._by_hand is not None:
            self._by_hand.wrote(call.filled)
        about: dict[str, Any] = {}
        if self.lines is not None and self.lines.segment == "forward":
            from samestep.verification.recording.lines import storages_of

            about = {"traced": True, "at": storages_of(call.tensors)}
        self.journal.write("collective", window=self.window, **about, **call.description)

    def on_worker(self, key: str, worker: int, states: dict[str, bytes], used: list[str]) -> None:
        """Writes down the generators of a DataLoader's worker; called there."""
        reported = {name: digest_of_bytes(state) for name, state in states.items()}
        self.on_event("worker", key=key, worker=worker, states=reported, used=used)

    def on_event(self, kind: str, **fields: Any) -> None:
        self.settle()
        if kind == "mode":
            self.note_mode(training=fields["training"])
            return
        if kind == "evaluates":
            self.note_evaluation()
            return
        if kind == "normalised":
            self.evaluations.normalised(fields["mean"])
            return
        if kind == "compresses":
            from samestep.pipelines.pipeline import Pipeline

            if not isinstance(fields["model"], Pipeline):  # which is reported by itself
                self.compressing.add(**fields)
            return
        if kind == "scheduled" and fields["why"] is None:
            fields = _held_against(**fields)
        if kind == "weights":
            self._given_weights.append(weakref.ref(fields.pop("model")))
            self._loaded_at, self._evaluates = fields["where"], None  # what is evaluated from now on are others
        if kind == "scaled":
            self.scaler = fields["scaler"]
            if self.scaler.is_enabled():
                self.journal.write(kind, window=self.window)
            return
        if kind == "to_local":
            self._watch_local(**fields)
            return
        if kind == "clipping":
            self._note_scaled_clipping(fields["where"], fields["most"])
            self.journal.write(kind, window=self.window, where=fields["where"])
            return
        if kind == "save_together":
            fields["plain"] = _plain_in(fields.pop("value"))
        if kind in {"save", "load"}:
            if kind == "save":
                fields |= self.sizes_of_saved(fields["value"])
            fields["digests"] = _digests_in(fields.pop("value"))
            if not fields["digests"]:
                return  # a storage, which torch saves and loads by these functions when an object is sent
            if kind == "save":
                with contextlib.suppress(Exception):  # a state that is not there yet is none of the script's business
                    averaged = self._averages()
                    reported = {"optimizers": self.optimizers.states(), "averaged": averaged}
                    fields["state"] = self.optimizers.digests() | reported
            else:
                self._loaded, self._given_weights = fields["path"], []
        self.journal.write(kind, window=self.window, event=self.window, **fields)

    def _watch_local(self, where: str, local: Any) -> None:
        """Writes down, in the first window, the gradient of a replicated DTensor's local tensor."""
        number = self._local_tensors
        if self.window or number >= _MOST_LOCAL:
            return
        self._local_tensors += 1

        def write(gradient: Any) -> None:
            self.journal.write("local_gradient", window=self.window, number=number, where=where, of=digest(gradient))

        if not local.is_leaf:
            local.register_hook(write)

    def on_dropout(self, values: Any) -> None:
        """Writes down, once a window, from which state a mask would have been drawn.

        Ranks that hold parts of one layer need one mask for what all of them hold: of the first masks, that too.
        """
        import torch

        from samestep.verification.recording.parts import is_cut, local

        is_first = self._dropped_in != self.window
        if is_first:
            self._dropped_in, self._masks = self.window, 0
        is_looked_at = self.window < _MASKED and self._masks < _MOST_MASKS and self.optimizers.holds_parts
        if not is_first and not is_looked_at:
            return
        where, state = call_site(_frame()), digest(torch.get_rng_state())
        if is_first:
            self.journal.write("stream", window=self.window, state=state, where=where)
        if is_looked_at and not is_cut(values):
            self._masks += 1
            of = digest(local(values).detach())
            self.journal.write("mask", window=self.window, number=self._masks, of=of, state=state, where=where)

    def on_random(self, name: str, where: str, value: Any, *, own_generator: bool) -> Any:
        if self.sources is not None:
            self.sources.drew()
        if self.is_loading and name in ORDERING:
            note_order(self.journal, where, name, value, self._loads)
        self._draws_samples |= self.is_loading and not name.endswith(("randperm", "permutation"))
        if self.optimizers.all and (not self.is_loading or (self.evaluations.lasts and not own_generator)):
            self.evaluations.drew(value)  # masks of a collate function are other ones in other batches
        if self.is_elsewhere or (begins_parameters(name) and not self.optimizers.all):
            return value
        if self.window and self._is_fed and not self._is_over:
            self.open_window()  # a second step on the same batch may begin with noise
        place, within = self.draws.place(self.window, where), self.is_open and (self._is_fed or self.micro > 0)
        if within or (not self._is_fed and self.draws.count <= MOST_BEFORE):  # it may draw the samples themselves
            keep(self.journal, place, name, value, within=within)
        elif self._is_over and self._drawn_between != self.window:
            self._drawn_between = self.window
            self.journal.write("drawn_between", window=self.window, where=where)
        return value

    def on_seed(self, seed: str) -> None:
        if seed not in self._seeds and len(self._seeds) < _MOST_SEEDS:
            self._seeds.add(seed)
            self.journal.write("seeded", seed=digest_of_bytes(seed.encode()))

    def _note_scaled_clipping(self, where: str, most: float) -> None:
        """Clipping sees gradients that a scaler has made larger, unless they were unscaled before."""
        scaler = self.scaler
        if scaler is None or not scaler.is_enabled():
            return
        stages = [state["stage"].name for state in scaler._per_optimizer_states.values()]  # noqa: SLF001
        if "UNSCALED" not in stages:
            scale = scaler.get_scale()
            self.journal.write("clipped_scaled", window=self.window, where=where, scale=scale, most=most)


def _held_against(right: dict[str, Any], added: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """How far the gradients that a step of pipelining has added lie from those of the whole batch."""
    import torch

    from samestep.verification.numerics import distance

    unit = max((torch.finfo(one.dtype).eps for one in added.values()), default=0.0)
    found = distance(added, right)
    return {**fields, "worst": found.worst, "tensor": found.tensor, "unit": unit}


def unsynchronised_in(model: Any) -> list[str]:
    """Returns the names of the modules that normalise by a rank's own samples, where others are synchronised."""
    kinds = {bare(name): type(one).__name__ for name, one in model.named_modules()}
    is_some = any("SyncBatchNorm" in kind for kind in kinds.values())
    return [name for name, kind in kinds.items() if is_some and kind in LOCAL_NORMS]


def local_norms_in(modules: Iterable[Any]) -> int:
    """Returns how many modules normalise by a rank's own samples; none where others of the model are synchronised."""
    kinds = [type(one).__name__ for one in modules]
    return 0 if any("SyncBatchNorm" in kind for kind in kinds) else sum(kind in LOCAL_NORMS for kind in kinds)


def _digests_in(value: Any) -> dict[str, str]:
    return {name: digest(tensor) for name, tensor in named_tensors(value)}


def _plain_in(value: Any) -> dict[str, tuple[str, list[int]]]:
    """Name -> digest and shape of the tensors that torch.distributed.checkpoint takes for alike on all ranks."""
    import torch

    plain = {name: one for name, one in named_tensors(value) if type(one) in {torch.Tensor, torch.nn.Parameter}}
    return {name: (digest(one), list(one.shape)) for name, one in plain.items()}


def _frame() -> Any:
    import sys

    return sys._getframe(2)  # noqa: SLF001
