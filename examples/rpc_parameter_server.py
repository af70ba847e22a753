"""A parameter server on torch.distributed.rpc, and how far it is from the training of one process.

    rank 1   trainer   gradients of its part ──┐                        ┌──▶ weights
                                               ├──▶ server: mean, step ─┤
    rank 2   trainer   gradients of its part ──┘         rank 0         └──▶ weights

samestep run -n 3 examples/rpc_parameter_server.py
samestep run -n 3 examples/rpc_parameter_server.py --asynchronous    # a step for each trainer's gradients

`Server.step` returns a future, which is completed when the last trainer has sent its gradients: until then no thread of
the server waits. All parts are equally large, so the mean is the gradient of the whole batch. Asynchronous trainers
compute gradients at weights that others change meanwhile: no two runs are alike.
"""

import os
import sys
import threading

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import rpc
from torch.nn import functional as F

BATCH, EPOCHS = 64, 2


class Server:
    """Has the weights. It makes a step when `needed` trainers have sent their gradients."""

    def __init__(self, needed):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.needed, self.steps, self.lock = needed, 0, threading.Lock()
        self.sent, self.stepped = {}, torch.futures.Future()

    @rpc.functions.async_execution
    def step(self, trainer, gradients):
        """Takes the gradients of a trainer; the future holds the weights after the step."""
        with self.lock:
            self.sent[trainer], stepped = gradients, self.stepped
            if len(self.sent) == self.needed:
                parts = zip(*(self.sent[each] for each in sorted(self.sent)), strict=True)
                for parameter, its_own in zip(self.model.parameters(), parts, strict=True):
                    parameter.grad = sum(its_own) / self.needed
                self.optimizer.step()
                self.steps, self.sent, self.stepped = self.steps + 1, {}, torch.futures.Future()
                stepped.set_result([parameter.detach().clone() for parameter in self.model.parameters()])
        return stepped


def train(step, model, trainer, trainers):
    """Trains on a trainer's part of each batch; `step(trainer, gradients)` returns the next weights. Returns a loss."""
    data, part = load_digits(), BATCH // trainers
    x, y = torch.tensor(data.data[:1536]) / 16, torch.tensor(data.target[:1536])
    for start in [*range(trainer * part, len(x), BATCH)] * EPOCHS:
        loss = F.cross_entropy(model(x[start : start + part]), y[start : start + part])
        weights = step(trainer, torch.autograd.grad(loss, list(model.parameters())))
        nn.utils.vector_to_parameters(torch.cat([weight.flatten() for weight in weights]), model.parameters())
    return loss.item()


def trainer(server, number, trainers):
    """Runs on a trainer's rank, called by the server."""
    return train(server.rpc_sync().step, Server(1).model, number, trainers)


if __name__ == "__main__":
    rank, size, asynchronous = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "--asynchronous" in sys.argv
    rpc.init_rpc(f"trainer{rank}" if rank else "server", rank=rank, world_size=size)
    if rank == 0:
        server, alone = Server(1 if asynchronous else size - 1), Server(1)
        calls = [(f"trainer{each}", trainer, (rpc.RRef(server), each - 1, size - 1)) for each in range(1, size)]
        losses = torch.futures.wait_all([rpc.rpc_async(*call, timeout=0) for call in calls])  # by default 60 s
        train(lambda *sent: alone.step(*sent).wait(), Server(1).model, 0, 1)
        weights = [nn.utils.parameters_to_vector(each.model.parameters()) for each in (server, alone)]
        print(f"{size - 1} trainers, {server.steps} steps, last loss {sum(losses) / len(losses):.3f}")
        print(f"one process, {alone.steps} steps: weights at most {(weights[0] - weights[1]).abs().max():.1e} apart")
    rpc.shutdown()  # waits until all ranks have come here, and serves calls meanwhile
