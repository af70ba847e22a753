"""Two-layer LSTM language model on sequences drawn from a handful of Markov chains."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, CHAINS = 20, 25, 4
BATCH = 12
STEPS = 40
MAX_NORM = 0.05


def markov_sequences(n, seed):
    g = torch.Generator().manual_seed(seed)
    tables = torch.softmax(3.0 * torch.randn(CHAINS, VOCAB, VOCAB, generator=g), dim=-1)
    chain = torch.randint(0, CHAINS, (n,), generator=g)
    state = torch.randint(0, VOCAB, (n,), generator=g)
    out = [state]
    for _ in range(LENGTH):
        state = torch.multinomial(tables[chain, state], 1, generator=g).squeeze(1)
        out.append(state)
    return torch.stack(out, dim=1)


class CharModel(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.rnn = nn.LSTM(32, hidden, num_layers=2, batch_first=True)
        self.out = nn.Linear(hidden, VOCAB)

    def forward(self, tokens):
        h, _ = self.rnn(self.embed(tokens))
        return self.out(h)


def average_gradients(params, world):
    if world == 1:
        return
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat.div_(world)
    start = 0
    for p in params:
        p.grad.copy_(flat[start:start + p.numel()].view_as(p.grad))
        start += p.numel()


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")

    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True
    model = CharModel().cuda()
    params = [p for p in model.parameters() if p.requires_grad]
    if world > 1:
        for p in params:
            dist.broadcast(p.data, src=0)
    optimizer = torch.optim.SGD(params, lr=2.0, momentum=0.5, foreach=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=1000)

    data = markov_sequences(600, seed=1)
    order = torch.Generator().manual_seed(2)
    history = []
    for step in range(STEPS):
        picked = torch.randint(0, len(data), (BATCH,), generator=order)[rank::world]
        batch = data[picked].pin_memory().cuda(non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(params, MAX_NORM)
        average_gradients(params, world)
        scaler.step(optimizer)
        scaler.update()
        history.append((loss.detach(), norm.detach()))
        if (step + 1) % 10 == 0:
            mean_loss = torch.stack([h[0] for h in history]).mean()
            if world > 1:
                dist.all_reduce(mean_loss)
                mean_loss /= world
            if rank == 0:
                print(f"step {step + 1:3d} loss {mean_loss.item():.4f} grad norm {history[-1][1].item():.3f}")
            history.clear()

    model.eval()
    test = data[:96][rank::world].cuda()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        logits = model(test[:, :-1]).float()
    stats = torch.stack([
        F.cross_entropy(logits.flatten(0, 1), test[:, 1:].flatten(), reduction="sum"),
        torch.tensor(float(test[:, 1:].numel()), device="cuda"),
    ])
    if world > 1:
        dist.all_reduce(stats)
    if rank == 0:
        print(f"perplexity {torch.exp(stats[0] / stats[1]).item():.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
