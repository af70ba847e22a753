"""The benchmark of pipelines: waits that are known, and the same gradients on both sides."""

from __future__ import annotations

import statistics

import pytest
import torch
from small import small
from torch.distributed.pipelining import PipelineStage

import samestep
from samestep.bench import pipeline
from samestep.bench.harness import Options
from samestep.errors import UsageError
from samestep.pipelines.layers import Link
from samestep.pipelines.pipeline import Pipeline


def waited():
    with samestep.world(pipeline=2) as world:
        return pipeline.waiting(world, "fill-drain", Link(latency=0.001), 2), pipeline.rebalanced(world, 2)


def test_stages_that_wait_take_what_their_schedule_allows_or_longer(two_ranks):
    for ((ours, predicted), near), ((even, uneven), figures) in two_ranks(
        lambda: small(waited, (), pipeline, PASSES=1, FORWARD_S=0.004, BACKWARD_S=0.008)
    ):
        assert near["of_ideal"] < predicted[0] / statistics.median(ours)  # of less: without messages
        assert len(set(predicted)) == 1
        assert min(*ours, *predicted) >= 9 * 0.012  # 8 micro-batches, and the other stage's first and last
        assert min(even) >= 7 * 7 / 8 * 0.012
        assert min(uneven) >= 6.5 * 0.012
        assert figures["predicted_ratio"] == pytest.approx(18.375 / 19.5)


def measured_and_taken():
    with samestep.world(pipeline=2) as world:
        batch = torch.randn(pipeline.SAMPLES, pipeline.WIDTH), torch.randn(pipeline.SAMPLES, pipeline.WIDTH)
        model = pipeline.blocks()
        loss = torch.nn.functional.mse_loss
        plan = samestep.plan_pipeline(model, batch, loss, micro_batches=4, schedule="1f1b", repeats=1)
        return pipeline.in_pairs(world, model, plan, batch, 2)


@pytest.mark.prove
def test_every_prediction_is_measured_beside_its_steps(two_ranks):
    (ours, predicted), (_, same) = two_ranks(lambda: small(measured_and_taken, (), pipeline, SAMPLES=32, WIDTH=64))
    assert len(ours) == len(predicted) == 2
    assert predicted == same
    assert len(set(predicted)) == 2
    assert min(*ours, *predicted) > 0


def beside():
    """Times of both, and the gradients that both have left."""
    made = {}
    kept = PipelineStage.__init__

    def keep(stage, module, *args, **kwargs):
        kept(stage, module, *args, **kwargs)
        made["theirs"] = module

    PipelineStage.__init__ = keep
    own = Pipeline.step
    Pipeline.step = lambda self, batch: (made.__setitem__("ours", self), own(self, batch))[1]
    try:
        with samestep.world(pipeline=2) as world:
            batch = torch.randn(pipeline.SAMPLES, pipeline.WIDTH), torch.randn(pipeline.SAMPLES, pipeline.WIDTH)
            ours, theirs = pipeline.beside_torch(world, batch, 2)
    finally:
        PipelineStage.__init__, Pipeline.step = kept, own
    gradients = [[each.grad for each in made[side].parameters()] for side in ("ours", "theirs")]
    return (
        len(ours),
        len(theirs),
        all(torch.allclose(*pair, rtol=1e-4, atol=1e-8) for pair in zip(*gradients, strict=True)),
    )


def test_both_sides_compute_the_same(two_ranks):
    assert two_ranks(lambda: small(beside, (), pipeline, SAMPLES=32, WIDTH=64), timeout=200.0) == [(2, 2, True)] * 2


@pytest.mark.parametrize(("ranks", "said"), [(1, "samestep bench pipeline -n 2"), (9, "8 blocks make no 9 stages")])
def test_one_rank_is_no_pipeline_and_so_many_have_no_blocks(monkeypatch, ranks, said):
    monkeypatch.setattr(pipeline, "spawn", None)
    with pytest.raises(UsageError, match=said):
        pipeline.run(Options(ranks=ranks))
