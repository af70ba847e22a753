"""Autoregressive speed prediction with EMA weights; interrupted in the middle of an epoch and resumed."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS, LENGTH, BATCH = 480, 32, 48
STEPS, STOP = 30, 14


def drives(n, seed):
    g = torch.Generator().manual_seed(seed)
    push = torch.randn(n, LENGTH, 3, generator=g)
    speed, out = torch.zeros(n), []
    for t in range(LENGTH):
        speed = 0.8 * speed + torch.tanh(push[:, t, 0]) * (1 + 0.5 * push[:, t, 1]) - 0.1 * push[:, t, 2].abs()
        out.append(speed)
    return push, torch.stack(out, dim=1)


class SpeedModel(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.rnn = nn.GRU(3, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.head(self.rnn(x)[0]).squeeze(-1)


class Trainer:
    def __init__(self, rank, world, device):
        self.rank, self.world, self.device, self.step = rank, world, device, 0
        torch.manual_seed(120)
        self.net = SpeedModel().to(device)
        self.ema = SpeedModel().to(device).requires_grad_(False)
        self.ema.load_state_dict(self.net.state_dict())
        self.model = DDP(self.net, device_ids=[device.index]) if world > 1 else self.net
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=4e-3, capturable=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 1 - 0.9 * s / STEPS)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=128.0, growth_interval=8)
        self.noise = torch.Generator(device=device).manual_seed(121)

    def parts(self):
        return {"net": self.net, "ema": self.ema, "optimizer": self.optimizer,
                "schedule": self.schedule, "scaler": self.scaler}

    def save(self, path):
        if self.rank == 0:
            state = {k: v.state_dict() for k, v in self.parts().items()}
            torch.save({**state, "step": self.step, "noise": self.noise.get_state()}, path)
        if self.world > 1:
            dist.barrier()

    def load(self, path):
        state = torch.load(path, map_location=self.device, weights_only=True)
        for k, v in self.parts().items():
            v.load_state_dict(state[k])
        self.step = state["step"]
        self.noise.set_state(state["noise"].cpu())

    def run(self, x, y, until):
        per_epoch = ROWS // BATCH
        while self.step < until:
            epoch, position = divmod(self.step, per_epoch)
            order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(500 + epoch))
            idx = order[position * BATCH:(position + 1) * BATCH][self.rank::self.world]
            bx, by = (t[idx].pin_memory().to(self.device, non_blocking=True) for t in (x, y))
            jitter = torch.randn(BATCH, LENGTH, 3, generator=self.noise, device=self.device)
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                out = self.model(bx + 0.05 * jitter[self.rank::self.world])
            loss = F.mse_loss(out.float(), by)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            with torch.no_grad():
                for e, p in zip(self.ema.parameters(), self.net.parameters()):
                    e.lerp_(p, 0.1)
            self.step += 1
            shown = loss.detach().clone()
            if self.world > 1:
                dist.all_reduce(shown)
            if self.rank == 0 and self.step % 5 == 0:
                print(f"step {self.step} loss {shown.item() / self.world:.4f} scale {self.scaler.get_scale():.0f}")


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    where = [tempfile.mkdtemp() if rank == 0 else None]
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
        dist.broadcast_object_list(where, src=0)
    path = os.path.join(where[0], "state.pt")
    x, y = drives(ROWS, seed=122)

    first = Trainer(rank, world, device)
    first.run(x, y, STOP)
    first.save(path)
    second = Trainer(rank, world, device)
    second.load(path)
    second.run(x, y, STEPS)

    test_x, test_y = (t[rank::world].to(device) for t in drives(120, seed=123))
    with torch.no_grad():
        error = (second.ema(test_x) - test_y).square().sum()
    if world > 1:
        dist.all_reduce(error)
    if rank == 0:
        print(f"ema test rmse {(error / test_y[0].numel() / 120).sqrt().item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
