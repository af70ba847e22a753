"""Arguments of `samestep.world` that ranks which have met obey."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import samestep
from samestep.errors import DeviceError


def test_tensors_go_to_the_device_that_was_asked_for():
    with samestep.world(device="meta") as world:
        (batch,) = samestep.shards(torch.utils.data.TensorDataset(torch.ones(2)), world, batch_size=2)
        assert (world.device.type, batch[0].device.type) == ("meta", "meta")
    with pytest.raises(DeviceError, match="device 'cuda:77' was asked for"):
        samestep.world(device="cuda:77")


def waits_in_vain():
    with samestep.world(backend="gloo", timeout=0.5) as world:
        store, said = dist.distributed_c10d._get_default_store(), ""
        if world.rank == 0:
            try:
                dist.all_reduce(torch.ones(1))
            except RuntimeError as error:
                said = str(error)
            store.set("over", "")
        store.wait(["over"])
        return said


def test_a_collective_waits_for_the_timeout_of_the_world(two_ranks):
    said, _ = two_ranks(waits_in_vain)
    assert "500ms" in said
