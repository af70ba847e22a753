"""What a rank tracks for its next summary: optimizers, wrapped models, its last events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

import xxhash

from samestep.instrument.collective_call import BETWEEN_TWO, UNEVEN, CollectiveCall, group_name, root_of
from samestep.runtime.digest import digest, digest_of_bytes
from samestep.verification.journal import Event, place_of
from samestep.verification.recording.naming import bare, held_by, of_optimizer
from samestep.verification.recording.optimizers import digests

KEPT = 64  # events of a kind, among which the first that differs is looked for
AT_FIRST = 32 << 20  # bytes of parameters in the first summary, and of gradients as many
LATER = 8 << 20  # in the others: a larger model is looked at in turns


class EventStream:
    """Events of one kind, which all ranks should have in one order: their number, a running digest, and the last.

    Events have fields of these `names`, and share those that are given here.
    """

    def __init__(self, kind: str, *names: str, **same: Any) -> None:
        self.kind = kind
        self.count = 0
        self._names, self._same = names, {"kind": kind, **same}
        self._digest = 0
        self._last: deque[tuple[int, tuple[Any, ...]]] = deque(maxlen=KEPT)

    def add(self, digested: str, *values: Any) -> None:
        """Adds an event; `digested` is what has to be equal on all ranks."""
        self._digest = xxhash.xxh3_64_intdigest(f"{self._digest}{digested}".encode())
        self._last.append((self.count, values))
        self.count += 1

    @property
    def state(self) -> list[int]:
        return [self.count, self._digest]

    @property
    def events(self) -> list[Event]:
        named = [(index, zip(self._names, values, strict=True)) for index, values in self._last]
        return [{**self._same, "index": index, **dict(fields)} for index, fields in named]


class CallStream(EventStream):
    """The collectives of all ranks: what, in which order, of which shape.

    verify's recorder describes each call much better, which takes it some 20 microseconds; a script that averages every
    gradient itself would feel that. Here a call costs a few. Lines are kept, and not in the digest: ranks may call one
    collective from two branches.
    """

    def __init__(self) -> None:
        same = {"dtypes": [""], "reduce": None, "between_two": False}
        super().__init__("collective", "op", "where", "window", "shapes", "root", group="world", **same)
        # calls within groups, which other ranks need not make
        self.within = EventStream("collective", "op", "where", "window", "group", shapes=[], root=None, **same)

    def note(self, call: CollectiveCall, window: int) -> None:
        """Adds a call of this thread; another thread's come at any time between."""
        if call.name in BETWEEN_TWO or threading.current_thread() is not threading.main_thread():
            return
        group = call.arguments.get("group")
        if group is not None and not _is_of_all(group):
            self.within.add("", call.name, call.where, window, group_name(group))
            return
        form, root = _form(call), root_of(call.name, call.arguments)
        self.add(f"{call.name}{form}{root}", call.name, call.where, window, [form] if form else [], root)


def _form(call: CollectiveCall) -> str:
    """Type and shape of what is sent, where they have to be equal on all ranks."""
    tensor: Any = next(iter(call.arguments.values()), None)
    tensor = tensor[0] if isinstance(tensor, list | tuple) and tensor else tensor
    if not hasattr(tensor, "dtype") or "object" in call.name:
        return ""
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind if call.name in UNEVEN else f"{kind} {list(tensor.shape)}"


def _is_of_all(group: Any) -> bool:
    import torch.distributed as dist

    return hasattr(group, "size") and bool(group.size() == dist.get_world_size())  # a number where a rank is not in it


class TrackedModels:
    """The models that are wrapped, and what their wrappers promise."""

    def __init__(self) -> None:
        self.wraps = EventStream("wrap", "wrapper", "where", "names", "trained")
        self.is_not_comparable = False
        self.is_data_parallel = False
        self.is_hooked = False
        self.synchronises = False  # the last forward does

    def add(self, kind: str, model: Any, where: str) -> None:
        self.is_not_comparable |= kind == "FullyShardedDataParallel"  # flat pieces, of which no rank holds the same
        self.is_data_parallel |= _is_data_parallel(kind, model)
        if kind == "DistributedDataParallel" and _is_of_all(model.process_group):
            named = [(bare(name), one.requires_grad) for name, one in model.named_parameters()]
            names = [name for name, _ in named]
            trained = [name for name, is_trained in named if is_trained]
            self.wraps.add("\n".join(names), kind, where, names, trained)

    @property
    def is_wrapped(self) -> bool:
        """Whether DistributedDataParallel of all ranks holds one."""
        return self.wraps.count > 0

    @property
    def is_synchronised(self) -> bool:
        """Whether the gradients of the last forward are averaged over all ranks, and at once."""
        return self.is_wrapped and self.synchronises and not self.is_hooked


def _is_data_parallel(kind: str, model: Any) -> bool:
    """Whether each rank has data of its own: not where a second dim of the mesh may be one of tensor parallelism."""
    if kind == "fully_shard":
        meshes = [one.device_mesh for one in model.parameters() if hasattr(one, "_local_tensor")]
        return bool(meshes) and all(mesh.ndim == 1 and _is_of_all(mesh) for mesh in meshes)
    return kind != "DataParallel" and _is_of_all(model.process_group)


class TrackedOptimizer:
    """One optimizer, which the script may let go: its number in this process, the line that made it, its steps."""

    def __init__(self, number: int, where: str) -> None:
        self.number = number
        self.where = where
        self.steps = 0
        self._spot: Any = None  # the parameter, which is a small one
        self._spot_place: int | None = None
        self._spots: list[str] = []
        self._names: list[str] = []
        self._summaries = 0

    def note_spot(self, optimizer: Any) -> None:
        """Notes a digest of one parameter: whether somebody has made it equal since the last step."""
        parameters = of_optimizer(optimizer)
        if self._spot_place is None:
            trained = [i for i, one in enumerate(parameters) if one.grad is not None]
            self._spot_place = min(trained, key=lambda i: int(parameters[i].numel()), default=None)
        found = None
        if self._spot_place is not None and self._spot_place < len(parameters):
            found = parameters[self._spot_place]
        if found is None or found.device.type != "cpu" or hasattr(found, "_local_tensor"):
            self._spots.append("")  # a device would be waited for, at every step
            return
        self._spot = found
        self._spots.append(self.last_spot())

    def last_spot(self) -> str:
        """Returns the digest as it is now, also when the script has let go of the optimizer."""
        return "" if self._spot is None else digest(self._spot)[:16]

    def values(self, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Returns digests of parameters and of gradients, and what a summary says of them."""
        known = self._parameters(optimizer)
        picked = {name: known[name] for name in round_robin(known, self._summaries)}
        parameters, gradients = digests(picked), digests({name: one.grad for name, one in picked.items()})
        layout = [(name, place_of(value)) for name, value in parameters.items()]
        spots, self._spots = self._spots, []
        self._summaries += 1
        texts = {
            "names": repr([(name, tuple(one.shape)) for name, one in known.items()]),
            "layout": repr(layout),
            "parameters": repr(list(parameters.items())),
            "gradients": repr(list(gradients.items())),
        }
        summary: dict[str, Any] = {name: digest_of_bytes(text.encode()) for name, text in texts.items()}
        if not any(gradients.values()):
            summary["gradients"] = ""
        return parameters, gradients, {**summary, "spots": spots}

    def _parameters(self, optimizer: Any) -> dict[str, Any]:
        """Name -> parameter, sorted: ranks may give their optimizers one set in several orders."""
        parameters = of_optimizer(optimizer)
        if len(self._names) != len(parameters):
            held = held_by(parameters)
            self._names = [next(iter(held.get(id(one), ())), f"parameter {i}") for i, one in enumerate(parameters)]
        return dict(sorted(zip(self._names, parameters, strict=True)))


def round_robin(parameters: Mapping[str, Any], turn: int) -> list[str]:
    """Returns the names whose turn it is: one group after another, each as large as a summary may look at."""
    groups: list[list[str]] = [[]]
    size = 0
    most = LATER if turn else AT_FIRST
    for name, parameter in parameters.items():
        count = parameter.numel() * parameter.element_size()  # of a cut one the whole, which all ranks agree on
        if size + count > most and groups[-1]:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += count
    return groups[turn % len(groups)]
