"""`samestep.pipeline`: a model cut as planned, on all ranks alike."""

from __future__ import annotations

from dataclasses import asdict

from torch import nn

from samestep.errors import UsageError
from samestep.pipelines.choose import PipelinePlan
from samestep.pipelines.cutting import Recipe
from samestep.pipelines.pipeline import Pipeline
from samestep.pipelines.report import Foreseen
from samestep.runtime.exchange import tell_json
from samestep.runtime.world import World
from samestep.schedule.simulate import Costs

__all__ = ["pipeline"]


def pipeline(model: nn.Module, world: World, plan: PipelinePlan) -> Pipeline:
    """Returns this rank's stages of a model that is cut as planned: on all ranks as rank 0 has planned it.

    Collective: every rank of the world must call it. Times that were measured differ between ranks, and so may plans.

    Args:
        model: that was planned for, on this rank's device.
        world: made with `pipeline=` the number of stages; the ranks that remain are replicas of the whole. A world of
            one takes the same micro-batches one after another, and comes to the same bits.
        plan: made by :func:`samestep.plan_pipeline`.

    Returns:
        A module whose parameters are those of this rank's stages, to be given to an optimizer; its `step` takes the
        place of forward, loss and backward, and a call of it evaluates.

    Raises:
        ModelError: the model is not the one that was planned for, or cannot be cut so.
        UsageError: the plan is for another number of stages than `world.pipeline` has ranks.

    Example:
        >>> import samestep, torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, y = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)
        >>> with samestep.world(pipeline=1) as world:
        ...     plan = samestep.plan_pipeline(model, (x, y), nn.functional.cross_entropy, stages=1, repeats=1)
        ...     stage = samestep.pipeline(model, world, plan)
        ...     optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        ...     before = stage.step((x, y))
        ...     optimizer.step()
        ...     float(stage.step((x, y))) < float(before)
        True

    On two ranks, with data, clipping and a checkpoint::

        with samestep.world(pipeline=2) as world:
            stage = samestep.pipeline(model, world, plan)
            optimizer = torch.optim.AdamW(stage.parameters())
            batches = samestep.shards(dataset, world, batch_size=64)
            state = samestep.checkpoint("run", world, model=stage, optimizer=optimizer, data=batches)
            for epoch in state.epochs(3):
                for batch in batches:
                    stage.step(batch)
                    samestep.clip_grad_norm_(stage, 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    state.commit()
    """
    told = None if plan.recipe is None else plan.recipe.told()
    own = [plan.ends, plan.schedule, plan.micro_batches, plan.samples, asdict(plan.costs), told]
    ends, schedule, micro_batches, samples, costs, told = tell_json(world.everyone, own)
    foreseen = Foreseen(samples, micro_batches, Costs(**costs)) if len(ends) == world.pipeline.size else None
    if world.pipeline.size == 1:  # alone it holds all stages, which then are one
        ends, schedule = ends[-1:], "1f1b"
    if len(ends) != world.pipeline.size:
        raise UsageError(
            f"the plan has {len(ends)} stages, and the pipeline {world.pipeline.size} ranks: "
            f"samestep.world(pipeline={len(ends)}), or plan for stages={world.pipeline.size}"
        )
    return Pipeline(
        model,
        world,
        plan.loss_fn,
        ends=ends,
        schedule=schedule,
        micro_batches=micro_batches,
        weight=plan.weight,
        foreseen=foreseen,
        recipe=None if told is None else Recipe.heard(told),
    )
