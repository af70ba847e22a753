"""samestep: N processes take the same training step that one process would take, and can prove it.

docs/structure.md walks through the layers. Public names are loaded on first use (PEP 562), so that `samestep --help`
and the launcher start without waiting for torch; importing has no effects but one: torch.distributed, once it is
there, knows a backend `samestep`, and takes `mpi` for MPI.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from samestep._version import __version__ as __version__
from samestep.launch.rank.import_hooks import when_imported

if TYPE_CHECKING:
    from samestep import compress as compress
    from samestep.checkpoints.checkpoint import Checkpoint as Checkpoint
    from samestep.checkpoints.checkpoint import checkpoint as checkpoint
    from samestep.data.create import shards as shards
    from samestep.data.once import once as once
    from samestep.data.shards import Shards as Shards
    from samestep.errors import RankFailure as RankFailure
    from samestep.errors import SamestepError as SamestepError
    from samestep.errors import UsageError as UsageError
    from samestep.evaluation import evaluate as evaluate
    from samestep.launch.functions.spawn import spawn as spawn
    from samestep.pipelines.build import pipeline as pipeline
    from samestep.pipelines.pipeline import Pipeline as Pipeline
    from samestep.pipelines.plan import PipelinePlan as PipelinePlan
    from samestep.pipelines.plan import plan_pipeline as plan_pipeline
    from samestep.replicas.clipping import clip_grad_norm_ as clip_grad_norm_
    from samestep.replicas.drift import DriftGuard as DriftGuard
    from samestep.replicas.replicate import Replica as Replica
    from samestep.replicas.replicate import replicate as replicate
    from samestep.runtime.world import Axis as Axis
    from samestep.runtime.world import World as World
    from samestep.runtime.world import world as world
    from samestep.verification.report import Report as Report
    from samestep.verification.verify import verify as verify

_HOMES = {
    "Axis": "samestep.runtime.world",
    "Checkpoint": "samestep.checkpoints.checkpoint",
    "DriftGuard": "samestep.replicas.drift",
    "Pipeline": "samestep.pipelines.pipeline",
    "PipelinePlan": "samestep.pipelines.plan",
    "RankFailure": "samestep.errors",
    "Report": "samestep.verification.report",
    "Replica": "samestep.replicas.replicate",
    "SamestepError": "samestep.errors",
    "Shards": "samestep.data.shards",
    "UsageError": "samestep.errors",
    "World": "samestep.runtime.world",
    "checkpoint": "samestep.checkpoints.checkpoint",
    "clip_grad_norm_": "samestep.replicas.clipping",
    "compress": "samestep",  # a package
    "evaluate": "samestep.evaluation",
    "once": "samestep.data.once",
    "pipeline": "samestep.pipelines.build",
    "plan_pipeline": "samestep.pipelines.plan",
    "replicate": "samestep.replicas.replicate",
    "shards": "samestep.data.create",
    "spawn": "samestep.launch.functions.spawn",
    "verify": "samestep.verification.verify",
    "world": "samestep.runtime.world",
}

__all__ = [*sorted(_HOMES), "__version__"]  # noqa: PLE0604  (every entry is a string)


when_imported("torch.distributed", lambda module: import_module("samestep.runtime.registration").register(module))


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        import difflib  # here, since this seldom happens

        close = difflib.get_close_matches(name, _HOMES, n=1)
        hint = f": did you mean samestep.{close[0]}?" if close else ""
        message = f"module 'samestep' has no attribute {name!r}{hint}"
        raise AttributeError(message, name=name, obj=None)  # of a module python would say it once more, on a terminal
    value = import_module(f"samestep.{name}") if home == "samestep" else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
