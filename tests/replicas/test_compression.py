"""Compressed gradients on real ranks: what simulated ranks say, bit for bit, through buckets, faults and resumes."""

import re
import signal
import subprocess
import sys
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import samestep
from samestep import compress
from samestep.checkpoints.extra_state import CompressionResiduals
from samestep.compress.chunks import MAX_CHUNK, chunks_of, pieces_of
from samestep.compress.compressed_mean import PLAIN, ReductionContext, mean, run_all
from samestep.compress.error_feedback import ErrorFeedback
from samestep.errors import CheckpointError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")

CODECS = [*map(compress.named, compress.CODEC_NAMES), compress.Int8(rounding="nearest", block=64)]
CODECS += [compress.TopK(fraction=0.05, momentum=0.9, warmup=3)]
SOME = [compress.Int8(), compress.PowerSGD(), CODECS[-1]]  # every row, low rank, and memory of two kinds
SOME += [pytest.param(codec, marks=pytest.mark.prove) for codec in CODECS if codec not in SOME]
BUCKETS = 0.02  # MiB: several, and others after the first step


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 48), nn.Tanh(), nn.Linear(48, 40))


def inputs(rank, step):
    return torch.randn(6, 2, 8, 8, generator=torch.Generator().manual_seed(1000 * rank + step))


def named_gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def averaged(codec, steps=4, buckets=BUCKETS, set_to_none=True):
    torch.set_num_threads(1)
    with samestep.world() as world:
        model = samestep.replicate(network(), world, compress=codec, buckets=buckets)
        found = []
        for step in range(steps):
            model(inputs(world.rank, step)).square().mean().backward()
            found.append(named_gradients(model))
            model.zero_grad(set_to_none=set_to_none)
        return found, model.compression.sent


def own(rank, step):
    model = network()
    model(inputs(rank, step)).square().mean().backward()
    return named_gradients(model)


def simulated(codec, size, steps=4):
    """The same, on simulated ranks, every parameter by itself."""
    memories, found = [ErrorFeedback() for _ in range(size)], []
    for step in range(steps):
        brought = [own(rank, step) for rank in range(size)]
        found.append({})
        number = 0
        for name, gradient in brought[0].items():
            taken = codec.takes(gradient.shape)
            used = codec if taken else PLAIN
            pieces = pieces_of(name, gradient.shape, number, most=MAX_CHUNK if codec.cuts or not taken else None)
            number += len(pieces)
            (chunk,) = chunks_of(pieces, getattr(used, "block", 1))
            schemes = []
            for rank in range(size):
                flat = torch.zeros(chunk.length)
                chunk.views(flat)[0].copy_(brought[rank][name])
                schemes.append(mean(used, ReductionContext(chunk, rank, size, step, 0, memories[rank]), flat))
            found[-1][name] = chunk.views(run_all(schemes)[0][0])[0]
    return found


def same(one, other):
    return all(
        left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
        for left, right in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_real_ranks_come_to_the_simulated_ones_bits(three_ranks, codec):
    expected = simulated(codec, 3)
    for found, _ in three_ranks(averaged, codec):
        assert same(found, expected)


@pytest.mark.parametrize(
    ("codec", "settings"),
    [
        (compress.Int8(), (0.001, True)),
        (compress.TopK(), (25, False)),
        (compress.PowerSGD(), (25, True)),
        *(
            pytest.param(codec, settings, marks=pytest.mark.prove)
            for codec in (compress.Int8(), compress.TopK(), compress.PowerSGD())
            for settings in ((0.001, True), (25, True), (25, False))
        ),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_buckets_nor_on_who_owns_the_gradients(two_ranks, codec, settings):
    expected = simulated(codec, 2)
    for found, _ in two_ranks(averaged, codec, 4, *settings):
        assert same(found, expected)


def test_bytes_are_counted(two_ranks):
    compressed = sum(sent for _, sent in two_ranks(averaged, compress.Int8()))
    large = 576 * 48 + 48 * 40  # the kernel of 288 elements is exempt
    small = sum(parameter.numel() for parameter in network().parameters()) - large
    rows = [-(-576 * 48 // 512), -(-48 * 40 // 512)]
    plain = small + 3 * 64  # filled up to rows
    assert 4 * 2 * sum(rows) * 516 <= compressed <= 4 * (2 * (sum(rows) + 2) * 516 + 2 * 4 * plain)


def test_model_trains_on_halves_and_in_channels_last(two_ranks):
    for kinds in two_ranks(unusual):
        assert kinds == {"bfloat16": True, "channels_last": True}


def unusual():
    torch.set_num_threads(1)
    kinds = {}
    with samestep.world() as world:
        for kind in ("bfloat16", "channels_last"):
            network_ = network()
            network_ = network_.bfloat16() if kind == "bfloat16" else network_.to(memory_format=torch.channels_last)
            model = samestep.replicate(network_, world, compress=compress.Int8(exempt=0), buckets=BUCKETS)
            exact = samestep.replicate(network().to(next(network_.parameters()).dtype), world)
            near = []
            for step in range(3):
                for each in (model, exact):
                    each.zero_grad()
                    each(
                        inputs(world.rank, step).to(next(network_.parameters()).dtype)
                    ).float().square().mean().backward()
                for found, wanted in zip(model.parameters(), exact.parameters(), strict=True):
                    near.append(float((found.grad - wanted.grad).float().norm() / wanted.grad.float().norm()))
            kinds[kind] = max(near) < 0.05
    return kinds


def accumulated(codec):
    torch.set_num_threads(1)
    with samestep.world() as world:
        model = samestep.replicate(network(), world, compress=codec)
        data = torch.utils.data.TensorDataset(torch.cat([inputs(rank, 0) for rank in range(4)]))
        batches = samestep.shards(data, world, batch_size=24, micro_batch_size=4, shuffle=False)
        for (x,) in batches:
            batches.mean(model(x).square().mean(1)).backward()
        return named_gradients(model), model.compression.steps


def test_micro_batches_are_compressed_once_a_step(two_ranks):
    (one, steps), (other, _) = two_ranks(accumulated, compress.Int8())
    assert steps == 1
    assert same([one], [other])


def skipping(codec):
    torch.set_num_threads(1)
    with samestep.world() as world:
        model = samestep.replicate(network(), world, compress=codec, nonfinite="skip")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for step in range(4):
            x = inputs(world.rank, step)
            if step == 1 and world.rank == 1:
                x[0, 0, 0, 0] = float("nan")
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.nonfinite.skipped, all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("codec", SOME, ids=str)
def test_a_step_with_nan_is_left_out_and_owed_to_nobody(two_ranks, codec):
    assert two_ranks(skipping, codec) == [(1, True)] * 2


def resumed(folder, codec, steps, cut):
    torch.set_num_threads(1)
    with samestep.world() as world:
        model = samestep.replicate(network(), world, compress=codec, buckets=BUCKETS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        state = samestep.checkpoint(folder, world, every=cut, model=model, optimizer=optimizer)
        for step in range(state.step, steps):
            model(inputs(world.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state.commit()
        state.wait()
        return bool(state.resumed), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("codec", SOME, ids=str)
def test_a_run_resumes_bit_for_bit(two_ranks, tmp_path, codec):
    straight = two_ranks(resumed, tmp_path / "straight", codec, 6, 100)
    two_ranks(resumed, tmp_path / "cut", codec, 3, 3)
    again = two_ranks(resumed, tmp_path / "cut", codec, 6, 3)
    assert [was for was, _ in again] == [True, True]
    assert same([again[0][1], again[1][1]], [straight[0][1], straight[1][1]])
    assert same([again[0][1]], [again[1][1]])


def test_what_is_owed_shapes_the_run(two_ranks, tmp_path):
    """The test above would see it if nothing were saved."""
    codec = compress.TopK(fraction=0.05)
    straight = two_ranks(resumed, tmp_path / "straight", codec, 6, 100)
    two_ranks(resumed, tmp_path / "cut", codec, 3, 3)
    forgetful = two_ranks(forgetting, tmp_path / "cut", codec)
    assert not same([forgetful[0][1]], [straight[0][1]])


def forgetting(folder, codec):

    restore, CompressionResiduals.restore = CompressionResiduals.restore, lambda *_: None
    try:
        return resumed(folder, codec, 6, 3)
    finally:
        CompressionResiduals.restore = restore


@pytest.mark.parametrize(
    "codec", [SOME[0], *(pytest.param(codec, marks=pytest.mark.prove) for codec in SOME[1:3])], ids=str
)
@pytest.mark.filterwarnings("ignore:.*goes on with")
def test_another_number_of_ranks_shares_out_what_is_owed(two_ranks, three_ranks, tmp_path, codec):
    three_ranks(resumed, tmp_path, codec, 3, 3)
    found = two_ranks(resumed, tmp_path, codec, 5, 3)
    assert [was for was, _ in found] == [True, True]
    assert same([found[0][1]], [found[1][1]])


def refused(folder, codec):
    try:
        resumed(folder, codec, 6, 3)
    except CheckpointError as error:
        return str(error)
    return None


def test_another_codec_is_refused_and_nothing_is_loaded(two_ranks, tmp_path):
    two_ranks(resumed, tmp_path, compress.Int8(), 3, 3)
    for said in two_ranks(refused, tmp_path, compress.Int8(block=64)):
        assert re.search(r"model was saved with compress=Int8\(.*block=512.*now compressed by Int8\(.*block=64", said)
    for said in two_ranks(refused, tmp_path, compress.TopK()):
        assert "which cannot use the error-feedback residuals" in said


def wrongly(settings, dtype=torch.float32):
    with samestep.world() as world:
        try:
            samestep.replicate(network().to(dtype), world, **settings)
        except UsageError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    ("settings", "dtype", "said"),
    [
        ({"compress": "int4"}, torch.float32, "compress='int4' is no codec"),
        ({"compress": "int8"}, torch.float64, "Plain codes float32, float16 and bfloat16, and 0.weight is float64"),
        ({"compress": "fp16"}, torch.bfloat16, "Float16 saves nothing where gradients have 2 bytes already"),
        ({"compress": "int8", "reduce": "gloo"}, torch.float32, "leave reduce='gloo' out"),
        ({"compress": "int8", "buckets": "auto"}, torch.float32, "leave buckets='auto' out"),
    ],
)
def test_what_does_not_go_together_is_refused_on_every_rank(two_ranks, settings, dtype, said):
    for found in two_ranks(wrongly, settings, dtype):
        assert said in found


def with_momentum(codec, make):
    with samestep.world() as world, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = samestep.replicate(network(), world, compress=codec)
        optimizer = make(model.parameters())
        for step in range(3):
            model(inputs(world.rank, step)).sum().backward()
            optimizer.step()
        return [str(one.message) for one in said]


def test_an_optimizers_momentum_beside_top_ks_is_noticed_once(two_ranks):
    sgd = partial(torch.optim.SGD, lr=0.01)
    (told,), others = two_ranks(with_momentum, compress.TopK(fraction=0.1, momentum=0.9), partial(sgd, momentum=0.8))
    assert told == "SGD has a momentum of 0.8 beside that of TopK, so it counts twice: leave one of them at 0"
    assert others == []
    assert (
        "AdamW has a momentum of 0.9" in two_ranks(with_momentum, compress.TopK(momentum=0.9), torch.optim.AdamW)[0][0]
    )
    assert two_ranks(with_momentum, compress.TopK(fraction=0.1, momentum=0.9), sgd) == [[], []]
    assert two_ranks(with_momentum, compress.TopK(fraction=0.1), partial(sgd, momentum=0.8)) == [[], []]


def test_on_one_rank_it_changes_nothing_and_says_so_once():
    with samestep.world() as world:
        with pytest.warns(UserWarning, match="compress=Int8 changes nothing on one rank") as told:
            model = samestep.replicate(network(), world, compress="int8")
        model(inputs(0, 0)).sum().backward()  # warnings are errors in tests
    assert len(told) == 1
    assert (model.compression.sent, model.compression.codec.name) == (0, "Int8")  # one script for any number of ranks


def test_virtual_ranks_are_not_compressed():
    with (
        samestep.world(virtual_ranks=2) as world,
        pytest.raises(UsageError, match="virtual ranks are for the same bits"),
    ):
        samestep.replicate(network(), world, compress="int8")


DYING = """
import os, signal, sys, torch, samestep
with samestep.world() as world:
    model = samestep.replicate(torch.nn.Linear(1000, 1000), world, compress="int8")
    for step in range(100):
        if step == 5 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(1, 1000)).sum().backward()
"""


@pytest.mark.prove
def test_a_rank_killed_while_others_wait_is_named(tmp_path):
    (tmp_path / "train.py").write_text(DYING)
    command = [sys.executable, "-m", "samestep", "run", "-n", "2", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1" in done.stderr
    assert "SIGKILL" in done.stderr
