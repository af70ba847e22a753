"""What is compared of a rank: its optimizers with their parameters, and the wrappers around its models."""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


class Wrapping:
    """What wrappers have been put around models, and what they promise."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.where = ""
        self.is_foreign = False
        self.is_wrapped = False
        self.is_dealt = False
        self.is_hooked = False
        self.is_synchronised = False

    def add(self, kind: str, model: Any, where: str) -> None:
        """Notes one."""
        from samestep.verification.recording.naming import bare

        self.is_foreign |= kind == "FullyShardedDataParallel"  # flat pieces, of which no rank holds the same
        self.is_dealt |= _deals(kind, model)
        if kind == "DistributedDataParallel" and _is_of_all(model.process_group):
            self.is_wrapped = True
            self.where = where
            self.names += [bare(name) for name, _ in model.named_parameters()]

    @property
    def is_together(self) -> bool:
        """Whether the gradients of the last forward are averaged over all ranks, and at once."""
        return self.is_wrapped and self.is_synchronised and not self.is_hooked

    @property
    def order(self) -> list[str]:
        """Digests of the names as they are, and sorted."""
        from samestep.runtime.digest import digest_of_bytes

        return [digest_of_bytes("\n".join(names).encode()) for names in (self.names, sorted(self.names))]


def _deals(kind: str, model: Any) -> bool:
    """Whether each rank has data of its own: not where a second dim of the mesh may be one of tensor parallelism."""
    if kind == "fully_shard":
        meshes = [one.device_mesh for one in model.parameters() if hasattr(one, "_local_tensor")]
        return bool(meshes) and all(mesh.ndim == 1 and _is_of_all(mesh) for mesh in meshes)
    return kind != "DataParallel" and _is_of_all(model.process_group)


def _is_of_all(group: Any) -> bool:
    import torch.distributed as dist

    return bool(group.size() == dist.get_world_size())


class Subject:
    """One optimizer, which the script may let go.

    Attributes:
        number: among those of this process.
        where: the line that made it.
        steps: that it has taken.
    """

    def __init__(self, number: int, where: str) -> None:
        self.number = number
        self.where = where
        self.steps = 0
        self._last: Any = None  # the parameter, which is a small one
        self._names: list[str] = []
        self._probes: list[str] = []
        self._probed_one: int | None = None  # its place
        self._letters = 0

    def parameters(self, optimizer: Any) -> dict[str, Any]:
        """Returns name -> parameter, sorted: ranks may give their optimizers one set in several orders."""
        from samestep.verification.recording.naming import names_of, of_optimizer

        parameters = of_optimizer(optimizer)
        if len(self._names) != len(parameters):
            known = names_of(parameters)
            self._names = [known.get(id(one), f"parameter {i}") for i, one in enumerate(parameters)]
        return dict(sorted(zip(self._names, parameters, strict=True)))

    def probe(self, optimizer: Any) -> None:
        """Notes a digest of one parameter: whether somebody has made it equal since the last step."""
        self._probes.append(self._probed(optimizer))

    def _probed(self, optimizer: Any) -> str:
        from samestep.runtime.digest import digest
        from samestep.verification.recording.naming import of_optimizer

        parameters = of_optimizer(optimizer)
        if self._probed_one is None:
            trained = [i for i, one in enumerate(parameters) if one.grad is not None]
            self._probed_one = min(trained, key=lambda i: int(parameters[i].numel()), default=None)
        if self._probed_one is None or self._probed_one >= len(parameters):
            return ""
        one = parameters[self._probed_one]
        if one.device.type != "cpu" or hasattr(one, "_local_tensor"):
            return ""  # a device would be waited for, at every step
        self._last = one
        return digest(one)[:16]

    def last_probe(self) -> str:
        """Returns the digest as it is now, also when the script has let go of the optimizer."""
        from samestep.runtime.digest import digest

        return "" if self._last is None else digest(self._last)[:16]

    def values(self, optimizer: Any) -> tuple[dict[str, str | None], dict[str, str | None], dict[str, Any]]:
        """Returns digests of parameters and of gradients, and what a letter says of them."""
        from samestep.runtime.digest import digest_of_bytes
        from samestep.verification.checking import values

        known = self.parameters(optimizer)
        picked = {name: known[name] for name in values.turn_of(known, self._letters)}
        self._letters += 1
        parameters, gradients = values.of(picked)
        shapes = [(name, tuple(one.shape)) for name, one in known.items()]
        probes, self._probes = self._probes, []
        told = {
            "names": digest_of_bytes(repr(shapes).encode()),
            "layout": values.layout_of(parameters),
            "parameters": values.one_of(parameters),
            "gradients": values.one_of(gradients) if any(gradients.values()) else "",
            "probes": probes,
        }
        return parameters, gradients, told
