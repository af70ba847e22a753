"""What is saved beside the state of the named objects: each kind of it is one :class:`ExtraState`.

A run continues bit for bit only with all of it. Some of it is every rank's own, so a save gathers it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

from samestep.compress.error_feedback import State as Residuals
from samestep.errors import CheckpointError
from samestep.launch.rank.user_code import warn
from samestep.pipelines.pipeline import Pipeline
from samestep.replicas.compression import GradientCompression
from samestep.replicas.replicate import Replica
from samestep.replicas.virtual_engine import VirtualRankEngine
from samestep.runtime.exchange import all_gather_json, all_gather_tensors
from samestep.runtime.world import World

Named = Mapping[str, Any]


class ExtraState(Protocol):
    """One kind of state beside the objects, saved under its key."""

    key: str

    def capture(self, world: World, named: Named) -> Any:
        """Returns what belongs into a checkpoint; None where there is nothing. Collective."""

    def check(self, saved: Any, world: World, named: Named) -> None:
        """Raises CheckpointError, or warns, before anything is loaded; `saved` is None where nothing was captured."""

    def restore(self, saved: Any, world: World, named: Named) -> None:
        """Takes over what was captured, after the objects have loaded their state."""


class VirtualRankBuffers:
    """How many virtual ranks there are, and the buffers of every slice that it has changed: BatchNorm's statistics.

    On another number of ranks each takes the rows of the slices that it holds now.
    """

    key = "virtual"

    def capture(self, world: World, named: Named) -> Any:
        if world.virtual is None:
            return None
        buffers = {name: engine.buffers.state() for name, engine in self._engines(named).items()}
        return {"ranks": world.virtual.count, "threads": torch.get_num_threads(), "buffers": buffers}

    def check(self, saved: Any, world: World, named: Named) -> None:  # noqa: ARG002
        """Refuses another number of virtual ranks, whose slices would be others."""
        present = None if world.virtual is None else world.virtual.count
        if saved is None or present is None:
            if (saved is None) != (present is None):
                was = "none" if saved is None else saved["ranks"]
                warn(
                    f"the run was saved with virtual_ranks {was} and goes on with {present or 'none'}: from here on it "
                    "is another training in its last bits",
                )
            return
        if saved["ranks"] != present:
            raise CheckpointError(
                f"the run was saved with virtual_ranks={saved['ranks']}, and this world has {present}: its "
                "steps would be cut into other slices, and not go on bit for bit. Give world(virtual_ranks="
                f"{saved['ranks']}), or start anew in another directory"
            )
        if saved["threads"] != torch.get_num_threads():  # others add up in another order
            warn(
                f"the run was saved with {saved['threads']} CPU threads a rank, this one has "
                f"{torch.get_num_threads()}: the last bits may differ from here on",
            )

    def restore(self, saved: Any, world: World, named: Named) -> None:
        if saved is None or world.virtual is None:
            return
        for name, engine in self._engines(named).items():
            engine.buffers.load_state(saved["buffers"].get(name, {}))

    def _engines(self, named: Named) -> dict[str, VirtualRankEngine]:
        found = {name: thing.slices for name, thing in named.items() if isinstance(thing, Replica)}
        return {name: engine for name, engine in found.items() if engine is not None}


class CompressionResiduals:
    """The error-feedback residuals of all ranks: without them up to a step's gradients are lost.

    Of a model in stages it is a replica's, of all its stages together, so that it fits another cut. On another number
    of ranks it is divided (:mod:`samestep.compress.error_feedback`).
    """

    key = "compression"

    def capture(self, world: World, named: Named) -> Any:
        """Returns for each model its codec, steps, and the residual of each rank with the places of its pieces."""
        return {name: _residuals(world, named[name], one) for name, one in _compressions(named).items()} or None

    def check(self, saved: Any, world: World, named: Named) -> None:
        """Refuses another codec, or another setting of it, and warns where residuals are divided or dropped."""
        saved, present = saved or {}, _compressions(named)
        for name, compression in present.items():
            if name not in saved:
                continue
            was, now = saved[name]["codec"], compression.codec.declared()
            if was != now:
                raise CheckpointError(
                    f"{name} was saved with compress={_codec_text(was)}, and is now compressed by {_codec_text(now)}, "
                    "which cannot use the error-feedback residuals: give the codec that was used, save once with "
                    "compress=None to drop them, or take another directory"
                )
            ranks = len(saved[name]["residuals"])
            if ranks != world.data.size:
                warn(
                    f"{name} was saved by {ranks} ranks and resumes with {world.data.size}: the error-feedback "
                    f"residuals ({was['codec']}) are divided evenly, so the resumed run is not the same bit for bit"
                )
        for name in saved.keys() - present.keys() & named.keys():
            codec = _codec_text(saved[name]["codec"])
            warn(
                f"{name} was saved with compress={codec} and resumes without: the error-feedback residuals are dropped"
            )

    def restore(self, saved: Any, world: World, named: Named) -> None:
        for name, compression in _compressions(named).items():
            if name in (saved or {}):
                of = saved[name]
                states = [_split(*each) for each in zip(of["places"], of["residuals"], strict=True)]
                compression.load(of["steps"], compression.own(states, world.data))


def _residuals(world: World, model: Replica | Pipeline, compression: GradientCompression) -> dict[str, Any]:
    state = compression.state()
    parts = [(kind, name, part) for kind, pieces in state["owed"].items() for name, part in pieces.items()]
    flat = torch.cat([part for _, _, part in parts]) if parts else torch.zeros(0)
    places = [[kind, name, part.numel()] for kind, name, part in parts]
    if isinstance(model, Pipeline):  # of all stages of a replica together, whatever its next cut is
        places = [place for stage in all_gather_json(world.pipeline, places) for place in stage]
        flat = torch.cat(all_gather_tensors(world.pipeline, flat))
    return {
        "codec": state["declared"],
        "steps": state["steps"],
        "places": all_gather_json(world.data, places),
        "residuals": all_gather_tensors(world.data, flat),
    }


def _split(places: list[list[Any]], flat: torch.Tensor) -> Residuals:
    state: Residuals = {}
    parts = flat.split_with_sizes([length for _, _, length in places])
    for (kind, name, _), part in zip(places, parts, strict=True):
        state.setdefault(kind, {})[name] = part
    return state


def _codec_text(config: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key}={value!r}" for key, value in config.items() if key != "codec")
    return f"{config['codec']}({settings})"


def _compressions(named: Named) -> dict[str, GradientCompression]:
    """Those at work: one rank alone sends nothing."""
    models = {
        name: thing
        for name, thing in named.items()
        if isinstance(thing, Replica | Pipeline) and thing.world.data.size > 1
    }
    return {name: one.compression for name, one in models.items() if one.compression is not None}


class PipelineRng:
    """Where the random numbers of the pipelines' layers stand; those of a model saved in one piece begin."""

    key = "pipelines"

    def capture(self, world: World, named: Named) -> Any:  # noqa: ARG002
        return {name: thing.rng.state() for name, thing in named.items() if isinstance(thing, Pipeline)} or None

    def check(self, saved: Any, world: World, named: Named) -> None:
        """Nothing can be wrong."""

    def restore(self, saved: Any, world: World, named: Named) -> None:  # noqa: ARG002
        for name, thing in named.items():
            if isinstance(thing, Pipeline) and name in (saved or {}):
                thing.rng.load(saved[name])


class RngStates:
    """The random streams of every rank: torch's on the host and on the device, Python's and NumPy's.

    They are tensors with a row per rank, restored on as many ranks as saved, or on any number with virtual ranks:

        torch   [W, bytes]   uint8        python   [W, 625]  int64      W  world size
        cuda    [W, bytes]   uint8        numpy    [W, 624]  int64
    """

    key = "rng"

    def capture(self, world: World, named: Named) -> Any:  # noqa: ARG002
        version, words, gauss = random.getstate()
        vector = np.random.get_state(legacy=False)  # noqa: NPY002  (the global stream is what user code draws from)
        rows = {
            "torch": torch.get_rng_state(),
            "python": torch.tensor(words),
            "numpy": torch.from_numpy(vector["state"]["key"].astype(np.int64)),
        }
        if world.device.type == "cuda":
            rows["cuda"] = torch.cuda.get_rng_state(world.device)
        rest = {
            "python": [version, gauss],
            "numpy": [vector["bit_generator"], int(vector["state"]["pos"]), vector["has_gauss"], vector["gauss"]],
        }
        return {
            "ranks": world.size,
            "virtual": world.virtual is not None,
            "streams": {name: torch.cat(all_gather_tensors(world.everyone, row[None])) for name, row in rows.items()},
            "rest": all_gather_json(world.everyone, rest),
        }

    def check(self, saved: Any, world: World, named: Named) -> None:  # noqa: ARG002
        """Refuses what is no state of such streams, on the rank whose row it is."""
        self._restorers(saved, world)

    def restore(self, saved: Any, world: World, named: Named) -> None:  # noqa: ARG002
        for put_back in self._restorers(saved, world):
            put_back()

    def _restorers(self, saved: Any, world: World) -> list[Callable[[], object]]:
        try:
            both_virtual = saved["virtual"] and world.virtual is not None
            return list(_restorers(saved, world)) if both_virtual or saved["ranks"] == world.size else []
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            raise CheckpointError(
                f"the saved random streams of rank {world.rank} cannot be what a run has saved: {type(error).__name__}:"
                f" {str(error)[:100]}"
            ) from error


def _restorers(saved: Any, world: World) -> Iterator[Callable[[], object]]:
    """Yields what puts each stream back, after trying its state on a generator that nobody draws from."""
    # Cloned: torch 2.13 crashes in set_rng_state on a row that does not start its storage.
    row = world.rank if world.virtual is None else 0  # with virtual ranks all draw equally between steps
    streams = {name: rows[row].clone() for name, rows in saved["streams"].items()}
    rest = saved["rest"][row]
    host = streams["torch"]
    torch.Generator().set_state(host)
    yield lambda: torch.set_rng_state(host)
    if world.device.type == "cuda" and "cuda" in streams:
        device = streams["cuda"]
        torch.Generator(world.device).set_state(device)
        yield lambda: torch.cuda.set_rng_state(device, world.device)
    version, gauss = rest["python"]
    python = (version, tuple(streams["python"].tolist()), gauss)
    random.Random().setstate(python)  # noqa: S311
    yield lambda: random.setstate(python)
    vector = _numpy_state(streams["numpy"].numpy(), *rest["numpy"])
    np.random.RandomState().set_state(vector)
    yield lambda: np.random.set_state(vector)  # noqa: NPY002


def _numpy_state(key: Any, generator: Any, position: Any, has_gauss: Any, cached: Any) -> dict[str, Any]:
    if not 0 <= position <= len(key) or key.shape != (624,):  # NumPy would read beyond the end
        raise ValueError(f"position {position} in NumPy's state of shape {key.shape}")
    state = {"key": key.astype(np.uint32), "pos": position}
    return {"bit_generator": generator, "state": state, "has_gauss": has_gauss, "gauss": cached}


EXTRAS: tuple[ExtraState, ...] = (VirtualRankBuffers(), CompressionResiduals(), PipelineRng(), RngStates())  # RNG last
