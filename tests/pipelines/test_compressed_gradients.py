"""Replicas of a stage add up in compressed messages: as data parallel training does, in any cut, and after a resume."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep import compress
from samestep.errors import UsageError
from samestep.pipelines.gradient_sync import make_compression
from samestep.pipelines.pipeline import Pipeline
from samestep.pipelines.plan import plan_pipeline
from samestep.testing import assert_same_bits

CODECS = {
    "fp16": lambda: compress.named("fp16"),
    "sign": lambda: compress.named("sign"),
    "topk": lambda: compress.TopK(fraction=0.05),
}
ONE, EARLY, LATE = (1, (5,)), (2, (1, 5)), (2, (4, 5))


def model():
    torch.manual_seed(0)
    layers = [nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 48)]
    return nn.Sequential(*layers)


def dataset():
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(48, 48, generator=generator), torch.randn(48, 48, generator=generator))


def piped(cut, codec, path=None, stop=99):
    """Trains two epochs; returns this rank's parameters, and the bytes that it has sent."""
    stages, ends = cut
    with samestep.world(pipeline=stages) as world:
        stage = Pipeline(model(), world, F.mse_loss, ends=ends, micro_batches=1, codec=CODECS[codec]())
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        batches = samestep.shards(dataset(), world, batch_size=8)
        state = samestep.checkpoint(path, world, every=1, model=stage, optimizer=optimizer, data=batches)
        for _ in state.epochs(2):
            for batch in batches:
                stage.step(batch)
                optimizer.step()
                optimizer.zero_grad()
                state.commit()
                if state.step == stop:
                    break
            if state.step == stop:
                break
        state.wait()
        return {name: each.detach().clone() for name, each in stage.named_parameters()}, stage.compression.sent


def replicated(codec):
    with samestep.world() as world:
        bare = model()
        replica = samestep.replicate(bare, world, compress=CODECS[codec]())
        optimizer = torch.optim.SGD(replica.parameters(), lr=0.1)
        batches = samestep.shards(dataset(), world, batch_size=8)
        for _ in range(2):
            for x, y in batches:
                batches.mean(F.mse_loss(replica(x), y, reduction="none").mean(1)).backward()
                optimizer.step()
                optimizer.zero_grad()
        return {name: each.detach().clone() for name, each in bare.named_parameters()}, replica.compression.sent


def merged(results):
    found = {name: each for own, _ in results for name, each in own.items()}
    return {name: found[name] for name in sorted(found)}


@pytest.fixture(scope="module")
def one_stage(two_ranks):
    """What two replicas of one stage have, by codec."""
    return cache(lambda codec: two_ranks(piped, ONE, codec))


@pytest.mark.parametrize("codec", CODECS)
def test_one_stage_is_what_replicate_is(two_ranks, one_stage, codec):
    ours, theirs = one_stage(codec), two_ranks(replicated, codec)
    for name, each in theirs[0][0].items():
        torch.testing.assert_close(ours[0][0][name], each, rtol=1e-4, atol=1e-6)
    assert_same_bits(ours[0][0], ours[1][0])
    assert [sent for _, sent in ours] == [sent for _, sent in theirs]


@pytest.mark.parametrize("codec", CODECS)
def test_two_stages_of_two_replicas_have_the_bits_of_one(four_ranks, one_stage, codec):
    one, two = one_stage(codec), four_ranks(piped, EARLY, codec)
    assert_same_bits(merged(two[:2]), merged(two[2:]))
    assert_same_bits(merged(two), merged(one))
    assert sum(sent for _, sent in two) == sum(sent for _, sent in one)


@pytest.mark.prove
def test_what_is_owed_is_saved_and_goes_on_in_another_cut(four_ranks, one_stage, tmp_path):
    """Five steps, three in another cut, and the rest as before."""
    path = tmp_path / "run"
    four_ranks(piped, EARLY, "topk", path, 5)
    four_ranks(piped, LATE, "topk", path, 8)
    assert_same_bits(merged(four_ranks(piped, EARLY, "topk", path)), merged(one_stage("topk")))


def asked(codec, **options):
    with samestep.world() as world:
        batch = torch.ones(8, 48), torch.ones(8, 48)
        plan = plan_pipeline(model(), batch, F.mse_loss, stages=2, micro_batches=2, repeats=1)
        stage = samestep.pipeline(model(), world, plan, compress=codec, **options)
        stage.step(batch)
        return None if stage.compression is None else stage.compression.codec.name


def asked_by_name():
    return asked("int8"), asked("sign", devices=["cpu", "cpu"]), asked(compress.TopK())


def test_it_is_asked_for_by_name_or_with_settings(two_ranks):
    assert two_ranks(asked_by_name) == [("Int8", "Sign", "TopK")] * 2


def refused_on_two_devices():
    with samestep.world() as world, pytest.raises(UsageError, match="compress=Int8 is for gradients of one device"):
        make_compression(model(), world, compress.Int8(), [torch.device("cuda:0"), torch.device("cuda:1")])


def test_several_devices_of_one_process_are_refused(two_ranks):
    two_ranks(refused_on_two_devices)


def test_one_replica_sends_nothing_and_is_told():
    with pytest.warns(UserWarning, match="compress=Int8 changes nothing on one rank"):
        assert asked("int8") is None
    with pytest.raises(UsageError, match="int9"):
        asked("int9")
