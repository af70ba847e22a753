"""Model parallel on two GPUs of one process: a batch in parts, each part's copy on a stream beside the computation.

samestep run -n 1 --fake-gpus 2 examples/gpu/two_devices_two_streams.py

`split_size` rows go through the first half at a time, and a second stream copies them on while the next are computed.
"""

import torch
from torch import nn

from data import digits


class Pipelined(nn.Module):
    """Two halves on two GPUs."""

    def __init__(self, split_size):
        super().__init__()
        self.split_size = split_size
        self.lower = nn.Sequential(nn.Linear(64, 128), nn.ReLU()).to("cuda:0")
        self.upper = nn.Linear(128, 10).to("cuda:1")
        self.copying = torch.cuda.Stream("cuda:1")

    def forward(self, x):
        """Returns logits, [batch, 10] on cuda:1."""
        results = []
        for part in x.split(self.split_size):
            hidden = self.lower(part)
            ready = torch.cuda.current_stream("cuda:0").record_event()
            with torch.cuda.stream(self.copying):
                self.copying.wait_event(ready)
                moved = hidden.to("cuda:1", non_blocking=True)
            computing = torch.cuda.current_stream("cuda:1")
            computing.wait_stream(self.copying)
            moved.record_stream(computing)
            results.append(self.upper(moved))
        return torch.cat(results)


def main():
    """Trains ten steps in parts and whole, and compares."""
    images, labels = digits().tensors
    ends = []
    for split_size in (120, 20):
        torch.manual_seed(0)
        model = Pipelined(split_size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(10):
            batch = slice(120 * step, 120 * (step + 1))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[batch].to("cuda:0")), labels[batch].to("cuda:1"))
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        ends.append([parameter.detach().cpu() for parameter in model.parameters()])
    apart = max((one - other).abs().max().item() for one, other in zip(*ends, strict=True))
    print(f"loss {loss.item():.3f}; in parts of 20 the weights are at most {apart:.1e} from the whole batch's")


if __name__ == "__main__":
    main()
