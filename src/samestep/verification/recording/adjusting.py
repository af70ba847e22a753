"""Changes the arguments of a script's calls of samestep's functions, as a run of verify needs.

Every run saves into a folder of its own: the second must not resume from what the first has saved.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from samestep.instrument.patch import Group, install
from samestep.runtime.digest import digest_of_bytes
from samestep.verification.recording.containers import mapped

Call = tuple[tuple[Any, ...], dict[str, Any]]

_pipelines_in_float64 = Group()


def adjusted(order: dict[str, Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Returns the arguments with which `samestep.name` is to be called in a run of this order."""
    if name == "checkpoint":
        return _elsewhere(order, args, kwargs)
    if name == "world" and order.get("virtual_ranks") and kwargs.get("virtual_ranks") is None:
        return args, kwargs | {"virtual_ranks": order["virtual_ranks"]}
    if name == "replicate":
        return _replicated(order, args, kwargs)
    if name == "pipeline" and order.get("micro_batches"):
        return _planned(order, args, kwargs)
    return (args, kwargs | _sharded(order, kwargs)) if name == "shards" else (args, kwargs)


def _without(kwargs: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name not in names}


def _replicated(order: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if order.get("double"):
        (kwargs["model"] if "model" in kwargs else args[0]).double().register_forward_pre_hook(_cast, with_kwargs=True)
    if order.get("double") or order.get("virtual_ranks"):
        kwargs = _without(kwargs, "compress", "average_every")
    changed = {"batchnorm": "local"} if order.get("virtual_ranks") else {}
    if order.get("ordered") and kwargs.get("compress") is None:
        changed["reduce"] = "ordered"  # as codecs always do: the order in which three ranks add shows in the bits
    return args, kwargs | changed


def _planned(order: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if order.get("double"):
        model = kwargs["model"] if "model" in kwargs else args[0]
        for each in model if isinstance(model, list | tuple) else [model]:
            each.double()
        install(_pipelines_in_float64)
        kwargs = _without(kwargs, "compress")
    if order.get("one"):
        kwargs = _without(kwargs, "devices")
    plan = kwargs["plan"] if "plan" in kwargs else args[2] if len(args) > 2 else None
    if plan is not None:  # which is made of times, so it differs from run to run; stages by hand do not
        plan = replace(plan, micro_batches=order["micro_batches"])
    return args[:2], kwargs | {"plan": plan}


@_pipelines_in_float64.patch("samestep.pipelines.pipeline", "Pipeline.step", "Pipeline.forward")
def _double_inputs(original: Any, stage: Any, *batch: Any) -> Any:
    return original(stage, *doubled(list(batch)))


def _sharded(order: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    if order.get("double"):
        from torch.utils.data import default_collate

        changed["collate_fn"] = functools.partial(_collated, kwargs.get("collate_fn") or default_collate)
    if kwargs.get("micro_batch_size"):
        changed["micro_batch_size"] = kwargs["micro_batch_size"] * order.get("together", 1)
    return changed


def _elsewhere(order: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    path = kwargs["path"] if "path" in kwargs else args[0]
    if path is None:
        return args, kwargs
    place = Path(order["saves"]) / digest_of_bytes(str(path).encode())[:8]
    place.parent.mkdir(parents=True, exist_ok=True)
    often = {"every": order["every"]} if order.get("every") else {}
    return (place, *args[1:]), _without(kwargs, "path") | often


def _cast(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return doubled(args), doubled(kwargs)


def _collated(collate: Any, samples: list[Any]) -> Any:
    return doubled(collate(samples))


def doubled(value: Any) -> Any:
    """Returns a batch whose float32 tensors are float64."""
    import torch

    return mapped(value, lambda tensor: tensor.double() if tensor.dtype == torch.float32 else tensor)


def raised(value: Any) -> Any:
    """Returns what goes into a module that computes in float64: tensors of any lower precision are float64."""
    return mapped(value, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
