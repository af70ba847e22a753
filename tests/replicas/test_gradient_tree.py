import pytest
import torch
from torch import nn

import samestep
from samestep.replicas import gradient_tree
from samestep.runtime.axis import HostMap
from samestep.testing import assert_same_bits


def trained(apart):
    """Weights after some steps on virtual ranks; `apart`, as if no rank saw another."""
    with samestep.world(virtual_ranks=4) as world:
        if apart:
            alone = tuple((rank,) for rank in range(world.size))
            world.data.host_map = HostMap(alone, world.data.host_map.processes)
        called = []
        by_messages, gradient_tree.sum_by_messages = (
            gradient_tree.sum_by_messages,
            lambda *given: called.append(by_messages(*given)),
        )
        try:
            model = samestep.replicate(nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 1)), world)
            optimizer = torch.optim.Adam(model.parameters())
            data = torch.utils.data.TensorDataset(torch.randn(48, 30, generator=torch.Generator().manual_seed(0)))
            batches = samestep.shards(data, world, batch_size=16)
            for (x,) in batches:
                batches.mean(model(x).squeeze(1).square()).backward()
                if batches.step_ends:
                    optimizer.step()
                    optimizer.zero_grad()
        finally:
            gradient_tree.sum_by_messages = by_messages
        return {name: value.clone() for name, value in model.state_dict().items()}, len(called)


@pytest.mark.parametrize("size", [2, 4])
def test_messages_and_shared_memory_leave_the_same_bits(size, request):
    run = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[size])
    (near, none), (far, three) = run(trained, False)[0], run(trained, True)[0]
    assert (none, three) == (0, 3)
    assert_same_bits(near, far)
