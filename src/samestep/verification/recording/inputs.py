"""What goes into a model that is trained: that it does, and, where no DataLoader tells, digests of the samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from samestep.instrument.patch import is_traced
from samestep.instrument.training import Hook
from samestep.verification.journal import TraceWriter
from samestep.verification.recording.containers import tensors_of
from samestep.verification.recording.naming import of_optimizer, parameters_of, roots

_LOOKS = 3  # for the models of an optimizer: when it is made, and at two steps; each takes 60 ms (measured)


class Inputs:
    """Writes down what the models see in the windows that `wanted` names, for as long as it returns one.

    Args:
        journal: to write to.
        wanted: returns the window at hand where its inputs are of interest, else None.
        forwarding: called before every forward of a model, with the model and the data that it gets.
        untrained: called before every forward, without gradients, of a model of which no optimizer holds a parameter.
    """

    def __init__(
        self,
        journal: TraceWriter,
        wanted: Callable[[], int | None],
        forwarding: Callable[[Any, tuple[Any, ...]], None] = lambda *_: None,
        untrained: Callable[[Any], None] = lambda _: None,
    ) -> None:
        self.evaluated: Callable[[], str | None] = lambda: None  # the evaluation whose data no DataLoader tells
        self.fed: Callable[[], int | None] = lambda: None  # the window whose batches a DataLoader tells, if of interest
        self.on_rows: Callable[[list[str]], None] = lambda _: None  # is given the rows of what is trained on
        self.keeps: Callable[[], int | None] = lambda: None  # the window of which all numbers are kept, if one is
        self._untrained = untrained
        self._journal = journal
        self._forwarding = forwarding
        self._wanted = wanted
        self._known: set[int] = set()
        self._beside: set[int] = set()
        self.used = False  # a model has been called, since somebody has set this back
        self.cannot_tell = False  # of a compiled one
        self._outputs: set[Any] = set()  # storages of what models have returned, weakly
        self._looks: Counter[tuple[int, int]] = Counter()

    def watch(self, optimizer: Any) -> None:
        """Looks at the models whose parameters an optimizer holds."""
        from torch.nn import Module  # whose methods hook a ScriptModule, too, which refuses by its own

        held = {id(parameter) for parameter in of_optimizer(optimizer)}
        look = (optimizer.samestep_number, len(held))
        self._looks[look] += 1
        if self._looks[look] > _LOOKS:
            return
        for root in roots():
            if id(root) in self._known:
                continue
            if not any(id(parameter) in held for parameter in parameters_of(root)):
                self._watch_untrained(root)
            else:
                self._known.add(id(root))
                note = Hook(self._note)
                Module.register_forward_pre_hook(root, note, with_kwargs=True, prepend=True)  # before FSDP gathers
                Module.register_forward_hook(root, Hook(self._note_outputs))
                inner: Any = getattr(root, "module", None)  # of a wrapper, which an evaluation may leave out
                is_wrapper = hasattr(inner, "register_forward_pre_hook")
                for part in [inner, *inner.children()] if is_wrapper else root.children():
                    Module.register_forward_pre_hook(part, Hook(self._use))  # an evaluation may call an encoder alone
                self.cannot_tell |= hasattr(root, "_orig_mod") or hasattr(inner, "_orig_mod")

    def _watch_untrained(self, root: Any) -> None:
        """It may be an average of the weights; or a model that another optimizer will hold, which is asked then."""
        from torch.nn import Module

        if id(root) not in self._beside and parameters_of(root):
            self._beside.add(id(root))
            Module.register_forward_pre_hook(root, Hook(self._use_untrained))

    def _use_untrained(self, model: Any, args: Any) -> None:
        import torch

        del args
        if not torch.is_grad_enabled() and not is_traced():
            self._untrained(model)

    def _use(self, model: Any, args: Any) -> None:
        import torch

        if not is_traced():
            self.used = True
            if not torch.is_grad_enabled():
                self._forwarding(model, args)

    def _note(self, model: Any, args: Any, kwargs: Any) -> None:
        import torch

        from samestep.verification.recording.rows import row_digests

        if is_traced():
            return
        self.used = True
        self._forwarding(model, args)
        trains = torch.is_grad_enabled()
        of_interest = [
            ("seen", "phase", None if trains else self.evaluated()),
            ("input", "window", self._wanted() if trains else None),
            ("used", "window", self.fed() if trains else None),
        ]
        wanted = [one for one in of_interest if one[2] is not None]
        kept = self.keeps() if trains else None
        given = self._given([*args, *kwargs.values()]) if wanted or kept is not None else []
        numbers = sum(one.numel() for value in given for one in tensors_of(value)) if wanted else 0
        for kind, name, value in wanted if given else []:
            rows = row_digests(given)
            self._journal.write(kind, **{name: value}, rows=rows, numbers=numbers)
            if kind == "input":
                self.on_rows(rows)
        if kept is not None:
            self._journal.write("given", window=kept, kept=self._journal.keep(_numbers(given)))

    def _given(self, values: list[Any]) -> list[Any]:
        """Leaves out what a model has computed, such as the pictures of a generator: that is no sample."""
        return [value for value in values if not any(map(self._is_computed, tensors_of(value)))]

    def _is_computed(self, tensor: Any) -> bool:
        from torch.multiprocessing.reductions import StorageWeakRef

        from samestep.verification.recording.modes import is_plain

        if tensor.grad_fn is not None:
            return True
        return is_plain(tensor) and StorageWeakRef(tensor.untyped_storage()) in self._outputs  # type: ignore[no-untyped-call]

    def _note_outputs(self, _: Any, __: Any, result: Any) -> None:
        """Remembers the tensors that a model has returned, also under other names (detach); not beyond their end."""
        import torch
        from torch.multiprocessing.reductions import StorageWeakRef

        if is_traced():
            return
        self._outputs = {one for one in self._outputs if not one.expired()}
        found = [one for one in tensors_of(result) if type(one) is torch.Tensor and one.layout == torch.strided]
        self._outputs |= {StorageWeakRef(one.untyped_storage()) for one in found}  # type: ignore[no-untyped-call]


def _numbers(values: list[Any]) -> Any:
    """All numbers of what a model gets, shape [numbers], but for those that another rank has computed."""
    import torch

    found = [one.detach().double().flatten() for value in values for one in tensors_of(value) if not one.requires_grad]
    return torch.cat(found) if found else torch.zeros(0)


def mixes_samples(model: Any) -> bool:
    """Returns whether the output for one sample depends on the others: a BatchNorm in training mode is in the model."""
    return any("BatchNorm" in type(module).__name__ and module.training for module in model.modules())
