"""One model on two devices of one process: by hand, by hand in micro-batches, and as samestep cuts it.

    by hand          device 0   F000                    B000      a device waits while the other works
                     device 1       F111       B111
    micro-batches    device 0   F0 F1 F2          B2 B1 B0        of 20 samples: while device 1 works on one,
                     device 1      F0 F1 F2 B2 B1 B0              device 0 has the next

python examples/model_parallel_by_hand.py

With two GPUs kernels are issued without waiting, so the devices overlap by themselves; the copy between them goes
through a second stream, so that it hides behind the work. Without them both devices are the CPU, and what is shown is
that all ways take the same step. Where to cut? `plan_pipeline` measures each layer, and says which cut is best.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

import samestep

SPLIT = 20  # samples of a micro-batch
DEVICES = ["cuda:0", "cuda:1"] if torch.cuda.device_count() > 1 else ["cpu", "cpu"]


class TwoHalves(nn.Module):
    """The first layers on one device, the rest on the other."""

    def __init__(self, network, split_size=None):
        super().__init__()
        self.first, self.second = network[:2].to(DEVICES[0]), network[2:].to(DEVICES[1])
        self.split_size = split_size
        self.stream = torch.cuda.Stream(DEVICES[0]) if DEVICES[0] != "cpu" else None  # a second one, for copies

    def moved(self, x):
        """Returns activations on the second device, copied beside what the first one computes."""
        if self.stream is None:
            return x.to(DEVICES[1])
        self.stream.wait_stream(torch.cuda.current_stream(DEVICES[0]))
        with torch.cuda.stream(self.stream):
            x.record_stream(self.stream)  # its memory is not reused before the copy is done
            return x.to(DEVICES[1], non_blocking=True)

    def forward(self, x):
        """Issues a micro-batch's second half after the next one's first."""
        outputs, waiting = [], None
        for part in x.split(self.split_size or len(x)):
            arriving = self.moved(self.first(part.to(DEVICES[0])))
            if waiting is not None:
                outputs.append(self.second(waiting))
            waiting = arriving
        return torch.cat([*outputs, self.second(waiting)])


def main():
    """Takes one backward each way, and compares gradients with those of the model on one device."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 10)).double()
    x, y = torch.randn(120, 64, dtype=torch.float64), torch.randint(10, (120,))
    whole, halves, micro = network, TwoHalves(copy.deepcopy(network)), TwoHalves(copy.deepcopy(network), SPLIT)
    cut = copy.deepcopy(network)
    F.cross_entropy(whole(x), y).backward()
    for model in (halves, micro):
        F.cross_entropy(model(x), y.to(DEVICES[1])).backward()
    with samestep.world(device=DEVICES[0]) as world:
        plan = samestep.plan_pipeline(cut, (x, y), F.cross_entropy, stages=2, repeats=1)
        stage = samestep.pipeline(cut, world, plan, devices=DEVICES, split_size=SPLIT)
        stage.step((x, y))
    for name, model in (("by hand", halves), ("micro-batches", micro), ("samestep", stage)):
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        print(f"{name:14} gradients at most {max((a.grad.cpu() - b.grad).abs().max() for a, b in pairs):.1e} apart")
    print(f"devices {', '.join(DEVICES)}; two streams: {'yes' if micro.stream else 'no, that needs two GPUs'}")


if __name__ == "__main__":
    main()
