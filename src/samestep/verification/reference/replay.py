"""The observer that lets a script, alone, take the recorded steps: its own code, the ranks' data, their parameters.

Every sampled window begins with the recorded parameters, so each is one clean comparison and no error grows. Passes
that no step was taken in (evaluations) run as the script has them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

from samestep.instrument.callbacks import LoaderPass, PassIterator
from samestep.instrument.dataloader import samplers_of
from samestep.instrument.patch import call_site, on_import
from samestep.launch.rank.observers import RankContext
from samestep.rankenv import variable
from samestep.runtime.digest import digest
from samestep.verification.journal import Event
from samestep.verification.judging.passes import cut_after_loading, passes
from samestep.verification.judging.record import Rank, Record, read
from samestep.verification.recording.chance import are_whole, as_tensor, begins_parameters, joined_draws
from samestep.verification.recording.naming import batch_norms, trained_of
from samestep.verification.recording.optimizers import digests, norms_of, rates_of, state_of, uncut
from samestep.verification.recording.script_observer import ScriptObserver, StopRecording
from samestep.verification.recording.spawning import for_one_rank, run_as_one_rank, target_of
from samestep.verification.reference.gradient_snapshot import GradientSnapshot
from samestep.verification.reference.norms import keep_whole, slice_norms
from samestep.verification.reference.updates import UpdateReplay

_FURTHER = 20  # steps that a script alone takes beyond those after which a rank has failed


class Replay(ScriptObserver):
    """Replays what SAMESTEP_VERIFY names: {"folder", "recorded", "ranks": [0, 1], …}."""

    def begin(self, context: RankContext) -> None:
        """Prepares the recorded windows; torch is not imported yet."""
        order = json.loads(variable("SAMESTEP_VERIFY") or "{}")
        self.record: Record = read(Path(order["recorded"]))
        self.open_trace(order, Path(order["folder"]), context, lambda: None if self._replayed else self.window)
        self._ranks: list[int] = order["ranks"]
        self._permuted: bool = order.get("permuted", False)
        self._merged: set[int] = set(order.get("merged", []))  # windows whose micro-batches are all given at once
        self._only: list[int] | None = order.get("only")  # at this window, the samples of this rank
        self._separate: dict[int, int] = dict(order.get("apart", []))  # window -> the optimizer whose gradients add up
        self._turns: int = order.get("turns", 1)  # steps of this process for one of the ranks'
        self._event = 0
        self._put: int | None = None  # the window that began with recorded values last
        self._teachers: dict[str, Any] = {}  # what the next window has of parameters that no optimizer holds, as it was
        self._made: dict[str, Any] = {}  # digests of the parameters that the last step has made
        self._known: set[int] = set()  # the optimizers whose parameters were put back when the window began
        self._placed = -1  # the window in which a new model was looked for
        self._compares = True  # the step at hand is taken from the ranks' parameters
        self._cuts_after_loading = len(self._ranks) > 1 and cut_after_loading(self.record)
        self._batch_after_batch: bool = order.get("batch_after_batch", False)  # each rank's by itself, and not joined
        self._replayed = self._training_passes()
        first = self.record.ranks[0] if self.record.ranks else Rank(0, [])
        self._steps, self._last = first.steps, _last(self.record)
        self.optimizers.known = {
            (event["optimizer"], len(event["names"])): event["names"] for event in first.of("names")
        }
        self._cut = {(event["key"], event["number"]): event.get("cut") for event in first.of("passed")}
        trained = {one.about["key"] for one in passes(first) if one.is_training}  # others read all samples here
        self._lengths = {event["key"]: event["length"] for event in first.of("pass") if event["key"] in trained}
        self._drawn = self._recorded_draws()
        self._sequences = self._recorded_sequences() if order.get("one_by_one") else {}
        self._drawn_here: Counter[tuple[str, bool]] = Counter()  # by line, with gradients or without
        self._snapshot = GradientSnapshot(first, always=order.get("unclipped", False))
        self._updates = UpdateReplay(self.record, self.optimizers)
        self.sizes: list[int] = []  # of the parts of the batch that is trained on
        self._loaded: list[list[int]] = []  # those of every batch of the pass
        self._used = 0  # and how many of them have been trained on
        self._is_over = False  # a pass has yielded all it has, and its last batch may still be trained on
        self._spawned = False
        self._target = next((event["target"] for event in first.of("begin") if event.get("spawned")), None)
        self.install_patches()
        if self.record.is_by_hand:
            on_import("torch.nn.modules.module", self._watch_models)
        self._are_local = next((event["norms"] for event in first.of("start") if event.get("norms")), [True])
        self._other_norms = False  # whether BatchNorm normalises something else than a value for each sample
        self._rows: list[Sequence[int]] = []  # places of each rank's samples, where no DataLoader yields them
        self.inputs.on_rows = self._note_rows
        on_import(
            "torch.nn.modules.batchnorm", lambda module: slice_norms(module, self._rows_of_ranks, self._on_other_norms)
        )

    def _training_passes(self) -> dict[tuple[str, int], list[list[Event]]]:
        """Key and number of a pass -> the chosen ranks' batches."""
        if self._turns > 1:
            return {}
        chosen = [rank for rank in self.record.ranks if rank.number in self._ranks]
        mine = [{(one.about["key"], one.about["number"]): one for one in passes(rank)} for rank in chosen]
        names = {name for theirs in mine for name, one in theirs.items() if one.is_training}
        return {name: [theirs[name].batches if name in theirs else [] for theirs in mine] for name in names}

    def on_spawn(self, start: Any, arguments: Any, processes: int) -> bool:
        """Is the one rank that a script starts by itself, in this process."""
        self._spawned = True
        sys.modules.setdefault("__mp_main__", sys.modules["__main__"])  # where the ranks had the script's classes
        start(*for_one_rank(start, (0, *arguments), processes))
        return True

    def on_process(self, process: Any) -> bool:
        """Is the first of them in this process, where the script starts each by itself."""
        if not self._target or target_of(process) != self._target:
            return False
        if not self._spawned:
            self._spawned = True
            sys.modules.setdefault("__mp_main__", sys.modules["__main__"])
            run_as_one_rank(process, len(self.record.ranks))
        return True

    def before_init(self, options: dict[str, Any]) -> dict[str, Any]:
        """Lets such a rank join a world of one, whatever it was told."""
        return {**options, "rank": 0, "world_size": 1} if self._spawned else options

    # --- data --------------------------------------------------------------------------------

    def on_length(self, loader: Any, key: str, own: int) -> int:
        """Says what it said on the ranks: schedules and progress depend on it. Or what it is here, if so ordered."""
        if self.order.get("own_lengths"):
            return own
        recorded = self._lengths.get(key)
        times = len(self._ranks) if self._batch_after_batch else 1
        return own if recorded is None else times * int(recorded)

    def on_pass(self, epoch: LoaderPass, own: PassIterator) -> Iterator[Any]:
        """Yields what the ranks have used together, where they have trained on it."""
        from samestep.data.iterable import dataset_length

        self.evaluations.begin_pass(epoch.key, epoch.number)
        parts = self._replayed.get((epoch.key, epoch.number))
        if parts is None:
            yield from self._own_batches(epoch, own)
            return
        self.evaluations.end()
        self.note_chosen(epoch)
        sampler = samplers_of(epoch.loader)[0]
        if getattr(sampler, "replacement", False):
            self.journal.write("draws_again", key=epoch.key, number=epoch.number, sampler=type(sampler).__name__)
        if self.order.get("own_lengths"):
            self.journal.write("own_length", key=epoch.key, own=dataset_length(epoch.loader))
        for index in range(max(map(len, parts))):
            self.settle()
            events = {
                rank: theirs[index] for rank, theirs in zip(self._ranks, parts, strict=True) if index < len(theirs)
            }
            self._is_over = False
            first = next(iter(events.values()))
            self._resync_window(first["loaded"] if "loaded" in first else first["window"])
            self.open_window()
            if self._batch_after_batch:
                for rank, event in events.items():
                    self._note_sizes([event["size"]], anew=not index or "loaded" not in first)
                    yield self.given(self._joined([(rank, event)], epoch.loader))
                continue
            chosen = self._whole_window(parts, index) if first["window"] in self._merged else [*events.items()]
            if self._only is not None and first["window"] == self._only[0]:
                chosen = [(rank, event) for rank, event in chosen if rank == self._only[1]]
            if self._cuts_after_loading:
                chosen = [(rank, event) for rank, event in chosen if rank == self._ranks[0]]
            chosen = chosen * 2 if self.order.get("twice") else chosen
            self._note_sizes([event["size"] for _, event in chosen], anew=not index or "loaded" not in first)
            yield self.given(self._joined(chosen, epoch.loader))
        self.settle()
        self._is_over = True
        self.evaluations.passed(epoch.key, epoch.number)
        self._use_sizes()

    def _note_sizes(self, sizes: list[int], *, anew: bool) -> None:
        """The sizes of a batch's parts hold from the backward pass of the one before it: it may be loaded ahead."""
        if anew:
            self._loaded.clear()
            self._used = 0
        self._loaded.append(sizes)
        self._use_sizes()

    def _on_other_norms(self) -> None:
        if self.is_open and not self._other_norms:
            self._other_norms = True
            self.journal.write("other_norms", window=self.window)

    def _rows_of_ranks(self) -> list[Sequence[int]]:
        """The places of each rank's samples in what the models get."""
        starts = [sum(self.sizes[:rank]) for rank in range(len(self.sizes))]
        return [range(start, start + size) for start, size in zip(starts, self.sizes, strict=True)] or self._rows

    def _note_rows(self, rows: list[str]) -> None:
        """Finds the samples that models get among the ranks' of this window; each is of one rank, and none has none."""
        inputs = [rank.in_window(self.window, "input") for rank in self.record.ranks if rank.number in self._ranks]
        ranks = [{row for event in events for row in event["rows"]} for events in inputs]
        of_each = [[place for place, row in enumerate(rows) if row in theirs] for theirs in ranks]
        are_known = all(of_each) and sorted(place for one in of_each for place in one) == [*range(len(rows))]
        self._rows = [*of_each] if are_known else []
        if len(self._rows) > 1 and not all(self._are_local):
            keep_whole([norm for norms in batch_norms() for norm in norms], self._are_local)

    def _use_sizes(self) -> None:
        if self._is_over and self._used >= len(self._loaded):
            self._loaded.clear()
        self.sizes = self._loaded[min(self._used, len(self._loaded) - 1)] if self._loaded else []
        if len(self.sizes) > 1 and not all(self._are_local):
            keep_whole([norm for norms in batch_norms() for norm in norms], self._are_local)

    def _whole_window(self, parts: list[list[Event]], index: int) -> list[tuple[int, Event]]:
        """All batches of this pass, and of all ranks, that were used in the window of one of them."""
        window = next(theirs[index]["window"] for theirs in parts if index < len(theirs))
        pairs = zip(self._ranks, parts, strict=True)
        return [(rank, event) for rank, theirs in pairs for event in theirs if event["window"] == window]

    def _resync_window(self, window: int) -> None:
        """Counts on from the recorded window, where the script alone has taken a step more or less than the ranks."""
        if window != self.window:
            is_placed = not self._event or self._put == min(window, self.window)
            self.journal.write("out_of_step", window=window, own=self.window, placed=is_placed)
            self.window = window
            self._event = next((step["event"] for step in self._steps if step["window"] >= window), len(self._steps))
            self.is_open = False

    def _own_batches(self, epoch: LoaderPass, own: PassIterator) -> Iterator[Any]:
        """What no step is taken in, the script loads as it has it."""
        import torch

        batches = islice(own, self._cut.get((epoch.key, epoch.number)))
        while (batch := self.next_of(batches)) is not None:
            gradients = torch.is_grad_enabled()
            self.evaluations.batch(epoch.key, epoch.number, batch.index, gradients=gradients)
            over = self._last is not None and self._event >= len(self._steps) and bool(self._replayed)
            if over and gradients and not self.evaluations.lasts:
                raise StopRecording(0)  # beyond what the ranks have trained on, data of its own prove nothing
            self.open_window()
            yield self.given(batch.value)
        self.evaluations.passed(epoch.key, epoch.number)
        self.journal.write("passed", key=epoch.key, number=epoch.number)

    def _joined(self, events: list[tuple[int, Event]], loader: Any) -> Any:
        from samestep.verification.reference.joining import UnjoinableError, joined, permuted

        sizes = [event["size"] for _, event in events]
        try:
            if (value := self._made_anew(events, loader)) is not None:
                return value
            value = joined(self._values(events), sizes)
        except UnjoinableError as error:
            value = self._collated(events, loader, error)
        return permuted(value, self._order(sizes)) if self._permuted and any(sizes) else value

    def _values(self, events: list[tuple[int, Event]]) -> list[Any]:
        from samestep.verification.reference.joining import UnjoinableError

        if not all(event["room"] for _, event in events):
            self._give_up("there was no more room to keep them")
        if any(event["kept"] is None for _, event in events):
            raise UnjoinableError("they hold what cannot be saved")
        try:
            return [self.record.value(rank, event["kept"]) for rank, event in events]
        except (AttributeError, ImportError, RecursionError, TypeError, UnpicklingError) as error:
            raise UnjoinableError(f"they cannot be read back: {type(error).__name__}: {error}") from error

    def _made_anew(self, events: list[tuple[int, Event]], loader: Any) -> Any:
        """One batch of the samples of several, if its rows are not samples: the halves of a batch of pairs, say.

        None where rows are samples, or where the samples are other ones when they are loaded again.
        """
        indices = [event["indices"] or [] for _, event in events]
        are_samples = any(event["size"] in {0, len(own)} for (_, event), own in zip(events, indices, strict=True))
        is_one_each = getattr(loader, "batch_sampler", None) is None  # what is loaded is no batch of samples
        if len(events) == 1 or are_samples or is_one_each or not all(indices):
            return None
        if not self._are_made_again(events, loader):
            return None
        self.journal.write("collated")
        known = [index for own in indices for index in own]
        order = self._order(list(map(len, indices))).tolist() if self._permuted else range(len(known))
        return self._loaded_anew(loader, [known[place] for place in order])

    def _are_made_again(self, events: list[tuple[int, Event]], loader: Any) -> bool:
        """Whether the samples of some batches are the same ones when they are loaded again, and nothing is drawn."""
        import torch

        from samestep.runtime.rng import RngState
        from samestep.verification.recording.datasets import sample_digest

        states = RngState.capture(torch.device("cpu"))
        anew = [sample_digest(self._loaded_anew(loader, event["indices"])) for _, event in events]
        if anew != list(map(sample_digest, self._values(events))):
            states.restore()
            return False
        return True

    def _collated(self, events: list[tuple[int, Event]], loader: Any, error: Exception) -> Any:
        """Loads the samples anew, and lets the script's own function make one batch of them, padded alike, say."""
        indices = [event["indices"] for _, event in events]
        known = [index for theirs in indices for index in theirs or []]
        if any(theirs is None for theirs in indices) or not callable(getattr(loader, "collate_fn", None)):
            self._give_up(str(error))
        if all(event["kept"] is not None for _, event in events) and not self._are_made_again(events, loader):
            self._give_up(f"{error}; and random numbers make them other ones when they are loaded again")
        self.journal.write("collated")
        return self._loaded_anew(loader, known)

    def _loaded_anew(self, loader: Any, indices: list[int]) -> Any:
        self.is_loading = True
        try:
            return loader.collate_fn([loader.dataset[index] for index in indices])
        finally:
            self.is_loading = False

    def _give_up(self, why: str) -> NoReturn:
        self.journal.write("unjoinable", why=why)
        raise StopRecording(0)

    def _order(self, sizes: list[int]) -> Any:
        """Another order of the samples, within each rank's part: a part may have statistics of its own."""
        import torch

        generator = torch.Generator().manual_seed(self.window)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = zip(starts, sizes, strict=True)
        return torch.cat([start + torch.randperm(size, generator=generator) for start, size in parts])

    # --- windows -----------------------------------------------------------------------------

    def open_window(self, *, evaluating: bool = False) -> None:
        """Puts the values back that the ranks had when it began."""
        if self.is_open or not self.optimizers.all:
            return
        self._begin_window(evaluating=evaluating)
        if not evaluating:
            self.trace("forward")

    def _begin_window(self, *, evaluating: bool) -> None:
        import torch

        self.is_open = True
        self._known = {one.samestep_number for one in self.optimizers.all}
        if not self.window:
            self.journal.write("own_digests", parameters=self.optimizers.digests()["parameters"])
        if not self.window and self.record.is_cut:
            own = {name: one for each in self.optimizers.all for name, one in self.optimizers.parameters(each).items()}
            kept = self.journal.keep(self._locals(own))
            self.journal.write("own_start", kept=kept)
        if (state := self.record.state(self.window // self._turns)) is not None:
            if self._turns == 1 and (evaluating or not torch.is_grad_enabled()):
                self._note_swapped()
            if self._put == self.window - 1 and self._turns == 1:  # what that step has made, before it is put back
                moved: dict[str, Any] = {
                    "buffers": self.optimizers.buffers(),
                    "before": self._teachers,
                    "teachers": self._moving(),
                }
                moved["written"] = self._written()
                kept = self.journal.keep(moved)
                self.journal.write("moved", window=self.window, kept=kept)
            self._put_back(state)
            self._put_teachers()

    def _written(self) -> dict[int, dict[str, Any]]:
        """The parameters that the script has written behind the last step, here or on a rank, by optimizer."""
        written: dict[int, set[str]] = {}
        for rank in self.record.ranks:
            for number, names in rank.written_before(self.window).items():
                written.setdefault(number, set()).update(names)
        found: dict[int, dict[str, Any]] = {}
        for optimizer in self.optimizers.all:
            held, number = self.optimizers.parameters(optimizer), optimizer.samestep_number
            own = {name for name, one in digests(held).items() if self._made.get(name, one) != one}
            names = own | written.get(number, set())
            found[number] = {name: one.detach() for name, one in self._locals(held).items() if name in names}
        return found

    def _note_swapped(self) -> None:
        """Keeps the parameters with which the script evaluates, where it has put others there than its steps make."""
        own = {name: one for each in self.optimizers.all for name, one in self.optimizers.parameters(each).items()}
        digested = digests(own)
        if self._made and any(self._made.get(name, digest) != digest for name, digest in digested.items()):
            kept = self.journal.keep(self._locals(own))
            where = call_site(sys._getframe(3))  # noqa: SLF001
            self.journal.write("swapped", window=self.window, kept=kept, where=where)

    def _watch_models(self, module: Any) -> None:
        def before(called: Any, _: Any) -> None:
            import torch

            if torch.is_grad_enabled():
                self._place(called)

        module.register_module_forward_pre_hook(before)

    def _place(self, module: Any) -> None:
        """Puts the ranks' values into a model that the script's own code is going to step for the first time."""
        step = self._steps[self._event] if self._event < len(self._steps) else None
        if step is None or not step["by_hand"] or self._placed == self.window:
            return
        if any(one.samestep_number == step["optimizer"] for one in self.optimizers.all):
            return
        self._placed = self.window
        state = self.record.state(self.window)
        theirs = {} if state is None else state["parameters"].get(step["optimizer"], {})
        own = trained_of(module)
        if own.keys() == theirs.keys() and all(own[name].shape == theirs[name].shape for name in own):
            for name, one in own.items():
                one.data.copy_(theirs[name])
            self._known.add(step["optimizer"])
            self._put_teachers()

    def _put_teachers(self) -> None:
        """The window begins with the ranks' values: so do the parameters that no optimizer holds, and steps change."""
        self._put = self.window
        self._teachers = {name: one.detach().clone() for name, one in self._moving(self.window + 1).items()}

    def _moving(self, window: int | None = None) -> dict[str, Any]:
        """Those that are not what they were at first when a window of the ranks begins, here the one at hand."""
        state = self.record.state(self.window if window is None else window)
        changed = {} if state is None else state["untrained"]
        return {name: one for name, one in self._locals(self.optimizers.untrained()).items() if name in changed}

    def forwarding(self, model: Any, data: tuple[Any, ...]) -> None:
        """A window begins here, at the latest, whose batch was loaded before the last step, or that is evaluated in."""
        import torch

        super().forwarding(model, data)
        trains = torch.is_grad_enabled()
        evaluates = not trains and self.window > 0 and self.evaluations.may_run
        begins = self._is_over and model.training
        if evaluates or (trains and (begins or not (self._replayed or self.evaluations.lasts))):
            self.open_window()

    def _put_back(self, values: dict[str, Any]) -> None:
        import torch

        with torch.no_grad():
            for optimizer in self.optimizers.all:
                theirs = values["parameters"].get(optimizer.samestep_number, {})
                for name, parameter in self.optimizers.parameters(optimizer).items():
                    own = uncut(parameter)
                    if name in theirs and own.shape == theirs[name].shape:
                        own.copy_(theirs[name])
            self._updates.put_back(values["states"])
            for name, buffer in self.optimizers.buffers().items():
                value = values["buffers"].get(name)
                if value is not None and value.shape == buffer.shape:
                    buffer.data.copy_(value)
            for name, parameter in self.optimizers.untrained().items():
                value, own = values["untrained"].get(name), uncut(parameter)
                if value is not None and value.shape == own.shape:
                    own.copy_(value)

    @property
    def is_placed(self) -> bool:
        """Whether the weights are the ranks': the window has begun with theirs, or no step has been taken yet."""
        return not self._event or (self.is_open and self._put == self.window)

    def on_comm_hook(self, name: str, where: str) -> bool:
        """One process has nothing to send, so nothing is lost on the way."""
        return True

    def before_backward(self, root: Any, where: str) -> None:
        """A window without a DataLoader begins here at the latest."""
        from samestep.verification.recording.graph import terms_of

        if root is not None:
            self.begin_backward(root)
        self.evaluations.end()
        self.open_window()
        self.micro += 1
        if len(self._ranks) == 1:
            self.journal.write("loss", event=self._event, terms=terms_of(root))

    def after_backward(self) -> None:
        """Keeps what has added up so far, where that is asked for."""
        self._used += 1
        self._use_sizes()
        self._snapshot.note(self._event, self.optimizers.all, self.loss_scale)
        wanted = self._separate.get(self.window)
        for optimizer in self.optimizers.all:
            if optimizer.samestep_number == wanted:
                self.journal.write("micro", window=self.window, kept=self._keep_gradients(optimizer))
        self.end_backward()
        self.trace("gradients")

    @staticmethod
    def _locals(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: uncut(one) for name, one in tensors.items()}

    def _keep_gradients(self, optimizer: Any) -> int | None:
        gradients = self._locals(self.optimizers.gradients(optimizer))
        return self.journal.keep(gradients)

    def before_step(self, optimizer: Any) -> None:
        if self.is_preparing or self.leaves_out(optimizer):
            return
        number = getattr(optimizer, "samestep_number", 0)
        self._compares = self._begins_as_theirs(optimizer)
        norms = norms_of(self.optimizers.gradients(optimizer))
        self.journal.write("rates", event=self._event, optimizer=number, rates=rates_of(optimizer), norms=norms)
        if self._is_compared():
            event, turn = divmod(self._event, self._turns)
            kept, used = self._keep_gradients(optimizer), None
            if (brought := self._snapshot.of(self.optimizers.parameters(optimizer))) is not None:
                kept, used = self.journal.keep(brought), kept
            self.journal.write("step", event=event, turn=turn, optimizer=number, kept=kept, used=used)
        self.trace("step")
        if self._event < len(self._steps) and self._compares and self._turns == 1:
            self._updates.before(optimizer, self.optimizers.parameters(optimizer), self._steps[self._event])

    def _is_compared(self) -> bool:
        """Whether the ranks' values of the step at hand are kept, and it is taken from the same parameters."""
        event = self._event // self._turns
        return event < len(self._steps) and self._steps[event]["kept"] is not None and self._compares

    def _begins_as_theirs(self, optimizer: Any) -> bool:
        """Whether a step is taken from the ranks' parameters; they were put back if they were known before it.

        Which ones the script's own code changes is known only when it does so for the first time. Without a backward
        pass the window may have begun with others, which a search has tried.
        """
        state = self.record.state(self.window // self._turns)
        number, is_by_hand = optimizer.samestep_number, self.optimizers.is_by_hand(optimizer)
        if state is None or (number in self._known if is_by_hand else self.micro > 0):
            return True
        theirs = state["parameters"].get(number, {})
        is_theirs = all(
            name in theirs and theirs[name].equal(uncut(one).to(theirs[name].device))
            for name, one in self.optimizers.parameters(optimizer).items()
        )
        if not is_by_hand:
            return is_theirs
        if is_theirs:
            self._put_teachers()
        return is_theirs

    def after_step(self, optimizer: Any) -> None:
        """Keeps the update where the ranks' is kept, counts, and ends where the recording has ended."""
        if not self.ends_step(optimizer):
            return
        self._updates.after()
        if self._is_compared() and self._turns == 1:
            states = {name: self._locals(state) for name, state in state_of(self.optimizers).items()}
            made = {"parameters": self._locals(self.optimizers.parameters(optimizer)), "states": states}
            kept = self.journal.keep(made)
            self.journal.write("updated", event=self._event, kept=kept)
        self._made |= digests(self.optimizers.parameters(optimizer))
        self._event += 1
        self.window += 1
        self.is_open, self.micro = False, 0
        self.trace_samples()
        self.scaler = None
        self._snapshot.forget()
        self.watch_uses()
        if self._last is not None and self._event >= self._last * self._turns:
            raise StopRecording(0)

    def on_event(self, kind: str, **fields: Any) -> None:
        """Writes down what is compared: the norms that clipping has seen, say."""
        self.settle()
        if kind == "evaluates":
            self.note_evaluation()
        elif kind == "metrics":
            self.journal.write(kind, window=self.window, placed=self.is_placed, **fields)
        elif kind == "save":
            sizes = self.sizes_of_saved(fields["value"])
            self.journal.write(kind, window=self.window, placed=self.is_placed, where=fields["where"], **sizes)
        elif kind in {"clip", "scheduler"}:
            self.journal.write(kind, window=self.window, **fields)
        elif kind == "mode":
            self.note_mode(training=fields["training"])
        elif kind == "scaled":
            self.scaler = fields["scaler"]

    # --- chance ------------------------------------------------------------------------------

    def _recorded_draws(self) -> dict[str, list[tuple[int, int | None]]]:
        """Place of a draw -> rank and number of each rank's that this process stands for."""
        found: dict[str, list[tuple[int, int | None]]] = {}
        for rank in self.record.ranks:
            if rank.number in self._ranks:
                for event in rank.of("draw"):
                    found.setdefault(event["place"], []).append((rank.number, event["kept"]))
        return found

    def on_random(self, name: str, where: str, value: Any, *, own_generator: bool) -> Any:
        import torch

        if self.optimizers.all and (not self.is_loading or (self.evaluations.lasts and not own_generator)):
            self.evaluations.drew(value)  # masks of a collate function are other ones in other batches
        if self.is_elsewhere or (begins_parameters(name) and not self.optimizers.all):
            return value
        if self.window and self._replayed and not self._is_over:
            self.open_window()
        place = self.draws.place(self.window, where)
        if self._turns > 1:
            return self._drawn_in_turn(name, place, value)
        if (drawn := self._drawn_one_by_one(where, value)) is not None:
            return drawn
        drawn = as_tensor(value)
        about: dict[str, Any] = {"shape": None, "digest": None}
        if drawn is not None:
            about = {"shape": [*drawn.shape], "digest": digest(drawn), "whole": are_whole(drawn)}
            about |= {"begins": name.endswith(".randint") and self._begins_as_ranks(drawn, place)}
        self.journal.write("own_draw", place=place, **about)
        if (self._replayed and not self.is_open) or self.order.get("own_draws"):
            return value  # before its samples are there, which are the ranks' already
        held = self._drawn.get(place, [])
        parts = [self.record.value(rank, number) for rank, number in held if number is not None]
        strided = self.order.get("strided", False)
        whole = joined_draws(name, value, parts, strided=strided) if len(parts) == len(self._ranks) else None
        if isinstance(whole, torch.Tensor) and whole.dim() and self._loaded and len(whole) == sum(self.sizes):
            whole = whole[self._rows_drawn_for(strided=strided and all(map(parts[0].equal, parts[1:])))]
        if whole is None and self.optimizers.all:  # what is drawn before may begin the parameters, which are put back
            self.journal.write("chance", place=place, name=name)
        return value if whole is None else whole

    def _rows_drawn_for(self, *, strided: bool) -> Any:
        """Places of the joined batch's samples in what is drawn for them: ranks take `drawn[rank::world_size]`, say."""
        import torch

        rows, ranks = torch.arange(sum(self.sizes)), len(self.sizes)
        if strided:
            rows = torch.cat([rows[rank::ranks] for rank in range(ranks)])
        return rows[self._order(self.sizes)] if self._permuted else rows

    def _begins_as_ranks(self, drawn: Any, place: str) -> bool:
        """Whether every rank has drawn the numbers that this process draws first, from the same range."""
        import torch

        held = [
            self.record.value(rank, number).flatten()
            for rank, number in self._drawn.get(place, [])
            if number is not None
        ]
        own = drawn.flatten()
        return len(held) == len(self._ranks) and all(torch.equal(one, own[: len(one)]) for one in held)

    def _drawn_in_turn(self, name: str, place: str, value: Any) -> Any:
        """What one rank has drawn in a step, in that of this process which stands for the rank's."""
        step, turn = divmod(self.window, self._turns)
        rank = self._ranks[turn]
        held = self._drawn.get(f"{step}|{place.partition('|')[2]}", [])
        parts = [self.record.value(rank, number) for one, number in held if one == rank and number is not None]
        whole = joined_draws(name, value, parts) if parts else None
        return value if whole is None else whole

    def _drawn_one_by_one(self, where: str, value: Any) -> Any:
        """What a rank has drawn for a micro-batch, where this process has those of one rank after the other's."""
        import torch

        trains = torch.is_grad_enabled()
        held = self._sequences.get((where, trains))
        if held is None:
            return None
        micro_batches, rank = self.order["one_by_one"], next(iter(held))
        number = self._drawn_here[where, trains]
        self._drawn_here[where, trains] += 1
        if trains:
            draws = round(len(held[rank]) / (micro_batches * len(self._steps)))  # for a micro-batch
            if not draws:
                return None
            micro, rest = divmod(number, draws)
            step, micro = divmod(micro, micro_batches * len(self._ranks))
            rank = self._ranks[micro // micro_batches]
            number = (step * micro_batches + micro % micro_batches) * draws + rest
        kept = held[rank][number] if number < len(held.get(rank, [])) else None
        return None if kept is None else joined_draws("", value, [self.record.value(rank, kept)])

    def _recorded_sequences(self) -> dict[tuple[str, bool], dict[int, list[int | None]]]:
        """Line of a draw, and whether with gradients -> rank -> what it has drawn there, in its order."""
        found: dict[tuple[str, bool], dict[int, list[int | None]]] = {}
        for rank in self.record.ranks:
            if rank.number in self._ranks:
                for event in rank.of("draw"):
                    where = event["place"].partition("|")[2].rpartition("|")[0]
                    theirs = found.setdefault((where, event["trains"]), {})
                    theirs.setdefault(rank.number, []).append(event["kept"])
        return found


def _last(record: Record) -> int | None:
    """Returns the step to end at; None where the ranks came to the end. Where one failed, whether one process does."""
    if not record.ranks or record.ranks[0].is_complete or not record.ranks[0].steps:
        return None
    enough = all(rank.ended is not None and rank.ended["enough"] for rank in record.ranks)
    return len(record.ranks[0].steps) + (0 if enough else _FURTHER)
