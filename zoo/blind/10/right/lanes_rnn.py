"""Recurrent net over long lanes of text; its state goes on from step to step and through a restart."""
import os
import shutil
import tempfile
import time

import inspect
import json.decoder
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

LANES, LENGTH, STEPS, STOP = 8, 16, 60, 33

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29815")


class Net(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.table = nn.Embedding(letters, 20)
        self.cell = nn.GRU(20, 40, batch_first=True)
        self.out = nn.Linear(40, letters)

    def forward(self, x, state):
        h, state = self.cell(self.table(x), state)
        return self.out(h), state.detach()


class Job:
    def __init__(self, folder):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.folder = folder
        text = inspect.getsource(json.decoder)
        letters = sorted(set(text))
        ids = torch.tensor([letters.index(c) for c in text])
        per_lane = len(ids) // LANES
        self.lanes = ids[: per_lane * LANES].view(LANES, per_lane).chunk(self.world)[self.rank]
        torch.manual_seed(0)
        self.net = Net(len(letters))
        self.opt = torch.optim.Adam(self.net.parameters(), lr=5e-3)
        self.state, self.done = None, 0

    def files(self):
        return os.path.join(self.folder, "common.pt"), os.path.join(self.folder, f"state{self.rank}.pt")

    def save(self):
        common, own = self.files()
        if self.rank == 0:
            torch.save([self.net.state_dict(), self.opt.state_dict(), self.done], common)
        torch.save(self.state, own)
        dist.barrier()

    def load(self):
        common, own = self.files()
        weights, moments, self.done = torch.load(common)
        self.net.load_state_dict(weights)
        self.opt.load_state_dict(moments)
        self.state = torch.load(own)

    def run(self, until):
        room = (self.lanes.shape[1] - 1) // LENGTH
        while self.done < until:
            at = self.done % room * LENGTH
            if at == 0:
                self.state = None
            piece = self.lanes[:, at : at + LENGTH + 1]
            logits, self.state = self.net(piece[:, :-1], self.state)
            loss = F.cross_entropy(logits.flatten(0, 1), piece[:, 1:].flatten()) / self.world
            self.opt.zero_grad()
            loss.backward()
            for p in self.net.parameters():
                dist.all_reduce(p.grad)
            self.opt.step()
            self.done += 1
        loss = loss.detach()
        dist.all_reduce(loss)
        if self.rank == 0:
            print(f"step {self.done}: loss {loss.item():.5f}", flush=True)


def main():
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    first = Job(folder[0])
    first.run(STOP)
    first.save()
    second = Job(folder[0])
    second.load()
    second.run(STEPS)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
