"""Character model over dataset descriptions, read in lanes with a GRU that keeps its state.

The text is cut into parallel lanes; each process reads some of them from left to right.
The run is stopped half way, written with torch.distributed.checkpoint and continued by a
new trainer, as after a preemption.
"""
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from sklearn import datasets
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

LANES = 8
CHUNK = 14
STEPS = 36


def read_text():
    loaders = (datasets.load_iris, datasets.load_wine, datasets.load_diabetes,
               datasets.load_breast_cancer, datasets.load_digits)
    text = " ".join(" ".join(load().DESCR.lower().split()) for load in loaders)
    letters = sorted(set(text))
    code = {c: i for i, c in enumerate(letters)}
    return torch.tensor([code[c] for c in text]), len(letters)


class LaneModel(nn.Module):
    def __init__(self, letters, width=48):
        super().__init__()
        self.embed = nn.Embedding(letters, 24)
        self.gru = nn.GRU(24, width, batch_first=True)
        self.next = nn.Linear(width, letters)

    def forward(self, ids, carry):
        x, carry = self.gru(self.embed(ids), carry)
        return self.next(x), carry


class Trainer:
    def __init__(self, text, letters, seed=23):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.model = LaneModel(letters)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        length = len(text) // LANES
        lanes = text[:length * LANES].view(LANES, length)
        self.lanes = lanes.chunk(self.world)[self.rank]
        self.carry = torch.zeros(1, len(self.lanes), 48)
        self.cursor = torch.tensor(0)

    def step(self):
        at = self.cursor.item()
        ids = self.lanes[:, at:at + CHUNK]
        target = self.lanes[:, at + 1:at + CHUNK + 1]
        logits, carry = self.model(ids, self.carry)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        for p in self.model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.optimizer.step()
        self.carry = carry.detach()
        self.cursor += CHUNK
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.world

    def state(self):
        weights, moments = get_state_dict(self.model, self.optimizer)
        return {"weights": weights, "moments": moments,
                "cursor": self.cursor, "carry": self.carry}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer,
                       model_state_dict=state["weights"], optim_state_dict=state["moments"])


def shared_folder():
    box = [tempfile.mkdtemp(prefix="lanes-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def advance(trainer, first, last):
    for step in range(first, last):
        loss = trainer.step()
        if trainer.rank == 0 and (step % 6 == 0 or step == last - 1):
            print(f"step {step:2d} loss {loss:.5f}", flush=True)
    return loss


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    text, letters = read_text()
    folder = shared_folder()

    trainer = Trainer(text, letters)
    advance(trainer, 0, STEPS // 2)
    trainer.save(folder)

    trainer = Trainer(text, letters)
    trainer.load(folder)
    loss = advance(trainer, STEPS // 2, STEPS)
    dist.barrier()
    if trainer.rank == 0:
        shutil.rmtree(folder)
        print(f"last loss {loss:.5f}, bits per letter {loss / 0.693147:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
