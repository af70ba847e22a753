"""`samestep.pipeline`: a model cut as planned, on all ranks alike."""

from __future__ import annotations

from dataclasses import asdict
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from samestep.compress.codecs import Codec
from samestep.errors import UsageError
from samestep.pipelines.devices import DevicesArg
from samestep.pipelines.losses import LossFn, WeightFn
from samestep.pipelines.model_chain import AnyModel, build_chain, normalize_model
from samestep.pipelines.pipeline import Pipeline, broadcast_tensors
from samestep.pipelines.plan import PipelinePlan
from samestep.pipelines.report import Prediction
from samestep.replicas.replicate import choose_codec
from samestep.runtime.exchange import broadcast_json
from samestep.runtime.world import World
from samestep.schedule.simulate import Costs

__all__ = ["pipeline"]


def pipeline(
    model: AnyModel,
    world: World,
    plan: PipelinePlan | None = None,
    *,
    loss_fn: LossFn | None = None,
    schedule: str | None = None,
    weight: WeightFn | None = None,
    devices: DevicesArg = None,
    micro_batches: int | None = None,
    split_size: int | None = None,
    compress: str | Codec | None = None,
) -> Pipeline:
    """Returns this rank's stages of a model that is cut as planned, on all ranks as rank 0 has planned it; or by hand.

    Collective: every rank of the world must call it. Times that were measured differ between ranks, and so may plans.

    Stages by hand need no plan: a list of modules, or an nn.Sequential of as many as there are stages. They run as they
    are, one stage each. Of a list each module is called with what the one before it gives, a tuple of tensors as
    several arguments; an nn.Sequential hands a tuple on as one. Their parameters have the names of an nn.ModuleList, or
    of the nn.Sequential: "1.weight".

    Args:
        model: that was planned for, or stages by hand; its layers are moved to the devices of their stages.
        world: made with `pipeline=` the number of stages; the ranks that remain are replicas of the whole. A world of
            one takes the same micro-batches one after another, and comes to the same bits.
        plan: made by :func:`samestep.plan_pipeline`; None for stages by hand.
        loss_fn: without a plan: of outputs and targets, the mean loss of a micro-batch, or all of its losses.
        schedule: without a plan: "fill-drain", "1f1b" (if None), "eager-1f1b" or "zero-bubble"; with several stages a
            rank "interleaved".
        weight: without a plan: of targets, how many items their mean loss is of; their samples if None. Within a loop
            over :func:`samestep.shards` its `weight` counts.
        devices: on which each process computes all stages, one for each: ["cuda:0", "cuda:1"]; one may come several
            times. Or how many of its own each process has: with 2, process 3 of a host has cuda:6 and cuda:7, and both
            are the CPU where there is no GPU. Then `world.pipeline` is 1, and every process is a replica. Under
            "interleaved" one for each of the ranks that were planned for.
        micro_batches: that a batch is cut into, instead of the plan's; without a plan 4 for each stage.
        split_size: samples of a micro-batch, at most: a batch of n is cut evenly into ceil(n / split_size). Instead of
            `micro_batches`.
        compress: for slow links between replicas: their gradients travel in fewer bytes, as in
            :func:`samestep.replicate`, "int8" say. Another training, which converges where the codec suits it; its
            error-feedback residuals are saved by :func:`samestep.checkpoint`.

    Returns:
        A module whose parameters are those of this rank's stages, to be given to an optimizer; its `step` takes the
        place of forward, loss and backward, and a call of it evaluates.

    Raises:
        ModelError: the model is not the one that was planned for, or cannot be cut so.
        UsageError: the plan is for another number of stages than `world.pipeline` has ranks, or than there are devices;
            a device is not there, or another process has it; `micro_batches` and `split_size` contradict each other;
            there is no such codec, or it does not fit a parameter's dtype, or the process has several devices.

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

    In one process on two devices; with GPUs, their copies travel while both compute::

        with samestep.world() as world:
            stage = samestep.pipeline(model, world, plan, devices=["cuda:0", "cuda:1"], split_size=20)

    Stages by hand, which hand a second tensor on around the middle one::

        with samestep.world(pipeline=3) as world:  # encoder(x) -> h, skip; middle(h, skip) -> h, skip; decoder(h, skip)
            stage = samestep.pipeline([encoder, middle, decoder], world, loss_fn=F.mse_loss, micro_batches=8)

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
    codec, size = choose_codec(compress, world, None, None), world.pipeline.size
    planned: dict[str, Any] = {}
    if plan is None:
        name, count, split_size = broadcast_json(world.everyone, [schedule or "1f1b", micro_batches, split_size])
        if loss_fn is None:
            raise UsageError(
                "neither a plan nor a loss: samestep.pipeline(stages, world, loss_fn=…), or plan_pipeline first"
            )
        model = normalize_model(model)
        ends = _ends_by_hand(model)
        _check_sizes(count, split_size)
        if count is not None and split_size is not None:
            raise UsageError(f"micro_batches={count} and split_size={split_size}: give one of the two")
        count = count or 4 * len(ends)
    else:
        if loss_fn is not None or schedule is not None or weight is not None:
            raise UsageError("loss_fn, schedule and weight are the plan's: give them to plan_pipeline, or no plan")
        loss_fn, weight = plan.loss_fn, plan.weight
        count = _micro_batches(plan, micro_batches, split_size)
        own = [plan.ends, plan.stages_per_rank, plan.schedule, plan.samples, plan.micro_batches, asdict(plan.costs)]
        own += [plan.digest, plan.splits, plan.loss_warning, count, split_size]
        ends, per_rank, name, samples, planned_count, costs, *rest = broadcast_json(world.everyone, own)
        planned["digest"], planned["splits"], planned["loss_warning"], count, split_size = rest
        planned["example_inputs"] = broadcast_tensors(
            world.everyone, 0, plan.example_inputs, torch.device("cpu"), world.everyone.control
        )
        ranks = len(ends) // per_rank
        if devices is not None or ranks == size:
            planned["prediction"] = Prediction(samples, planned_count, Costs(**costs))
        if size > 1 and ranks != size:
            several = f", {per_rank} on each of {ranks} ranks" if per_rank > 1 else ""
            raise UsageError(
                f"the plan has {len(ends)} stages{several}, and the pipeline {size} ranks: "
                f"samestep.world(pipeline={ranks}), or plan for stages={size}"
            )
    if size == 1 and devices is None:  # alone it holds all stages, which then are one
        ends, name = ends[-1:], "1f1b"
    return Pipeline(
        model,
        world,
        loss_fn,
        ends=ends,
        schedule=name,
        micro_batches=count,
        weight=weight,
        split_size=split_size,
        devices=devices,
        codec=codec,
        **planned,
    )


def _ends_by_hand(model: nn.Module) -> list[int]:
    """Returns, by stage, the layer behind its last."""
    if isinstance(model, nn.ModuleList):
        return list(range(1, len(model) + 1))
    if type(model) is not nn.Sequential:
        raise UsageError(
            f"where is {type(model).__name__} to be cut? Plan it: samestep.plan_pipeline(model, sample, loss_fn), or "
            "give its stages, a list of modules"
        )
    return list(accumulate(len(build_chain(nn.Sequential(child)).layers) for child in model))


def _micro_batches(plan: PipelinePlan, requested: int | None, split_size: int | None) -> int:
    """Returns how many micro-batches the plan's batch is cut into."""
    _check_sizes(requested, split_size)
    if split_size is None:
        return plan.micro_batches if requested is None else requested
    count = -(-plan.samples // split_size)
    if requested not in {None, count}:
        raise UsageError(
            f"micro_batches={requested} and split_size={split_size} contradict each other: {plan.samples} samples, "
            f"{split_size} in each, are {count} micro-batches: give one of the two"
        )
    return count


def _check_sizes(micro_batches: int | None, split_size: int | None) -> None:
    for name, number in (("micro_batches", micro_batches), ("split_size", split_size)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise UsageError(f"{name}={number!r}: give a whole number, 1 or more")
