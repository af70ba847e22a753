"""What is sent arrives as it lay in memory, so that kernels add in the same order wherever a model is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samestep
from samestep.pipelines.pipeline import Pipeline
from samestep.pipelines.tensor_meta import MAX_GAP, TensorMeta, read_header, write_header
from samestep.testing import assert_same_bits

WHOLE = torch.arange(2 * 3 * 4 * 12, dtype=torch.float32).view(2, 3, 4, 12)
LYING = {
    "straight": WHOLE,
    "turned": WHOLE.transpose(1, 3),
    "channels last": WHOLE.contiguous(memory_format=torch.channels_last),
    "a third of the last dim": WHOLE[..., 4:8],
    "a third, turned": WHOLE[..., 4:8].transpose(1, 2),
    "every second": WHOLE[:, :, ::2],
    "sizes of 1": WHOLE[:1, :, 1:2].transpose(0, 2),
    "none": WHOLE[:0].transpose(0, 1),
    "a number": torch.tensor(3.0),
}


def arrived(tensor):
    (meta,) = read_header(write_header(0, (TensorMeta.of(tensor),)))
    memory = meta.empty(torch.device("cpu"))
    sent = meta.memory_view(tensor).contiguous()
    assert sent.is_contiguous()
    assert sent.numel() == tensor.numel()
    return meta.unpack(memory.copy_(sent))


@pytest.mark.parametrize("name", LYING)
def test_a_tensor_arrives_as_it_lay(name):
    tensor = LYING[name]
    found = arrived(tensor)
    assert_same_bits(found, tensor)
    if tensor.numel():
        lies = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
        assert [(n, step) for n, step in zip(found.shape, found.stride(), strict=True) if n > 1] == lies


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, 1).expand(3, 5).t(),  # some elements are one and the same
        torch.arange(6.0).unfold(0, 3, 1),  # likewise, some of them
        torch.ones(4, MAX_GAP + 2, 6)[:, 0],  # much more memory than elements
    ],
)
def test_what_cannot_lie_so_lies_close(tensor):
    found = arrived(tensor)
    assert_same_bits(found, tensor)
    assert found.untyped_storage().nbytes() == 4 * tensor.numel()


def test_memory_for_what_is_sent_is_no_more_than_that():
    tensor = WHOLE.transpose(1, 3)
    meta = TensorMeta.of(tensor)
    assert meta.memory_view(tensor).is_contiguous()
    memory = meta.empty(torch.device("cpu"))
    assert meta.unpack(memory).data_ptr() == memory.data_ptr()


class Turned(nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


class Third(nn.Module):
    def forward(self, x):
        return x[..., 4:8]


class Looks(nn.Module):
    """A kernel that does otherwise where its inputs lie otherwise, more than attention does by its last bits."""

    def forward(self, x):
        return x * (1 + 0.1 * x.stride(1) + 0.01 * x.stride(2))


class Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


def model():
    torch.manual_seed(0)
    between = Turned(), Looks(), nn.Linear(5, 12), Third(), Looks()
    return nn.Sequential(nn.Linear(8, 8), *between, nn.Linear(4, 4), Mean())


def trained(ranks):
    """Losses and gradients of every cut into two, or of the whole."""
    batch = torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4
    found, last = {}, len(model())
    with samestep.world(pipeline=ranks) as world:
        for ends in [(cut, last) for cut in range(1, last)] if ranks == 2 else [(last,)]:
            stage = Pipeline(model(), world, F.cross_entropy, ends=ends, schedule="1f1b", micro_batches=4)
            loss = stage.step(batch)
            found[ends] = {name: one.grad for name, one in stage.named_parameters()} | {"loss": loss}
    return found


@pytest.fixture(scope="module")
def whole():
    (found,) = trained(1).values()
    return found


def test_every_cut_leaves_the_bits_of_one_process(two_ranks, whole):
    for found in two_ranks(trained, 2):
        assert len(found) == 7
        for own in found.values():
            assert_same_bits(own, {name: whole[name] for name in own})
