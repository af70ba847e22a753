import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)

VOCAB, MASK, CTX, DIM = 26, 0, 20, 32


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(CTX, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.bias = nn.Parameter(torch.zeros(VOCAB))
        nn.init.normal_(self.tok.weight, std=0.15)

    def forward(self, ids):
        h = self.body(self.tok(ids) + self.pos.weight)
        return F.linear(h, self.tok.weight, self.bias)


class Corpus:
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        base = torch.randint(1, VOCAB, (n, 1), generator=g)
        inc = torch.randint(1, 3, (n, 1), generator=g)
        self.text = (base - 1 + inc * torch.arange(CTX)) % (VOCAB - 1) + 1
        rate = 0.05 + 0.3 * torch.rand(n, 1, generator=g)
        self.masked = torch.rand(n, CTX, generator=g) < rate

    def batch(self, rows):
        labels = torch.where(self.masked[rows], self.text[rows], torch.full_like(self.text[rows], -100))
        inputs = torch.where(self.masked[rows], torch.full_like(self.text[rows], MASK), self.text[rows])
        return inputs, labels


def masked_lm_loss(logits, labels):
    """Averages over all masked positions of the global batch, however they are spread over processes."""
    count = (labels != -100).sum().float()
    if dist.is_initialized():
        dist.all_reduce(count)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return total / count.clamp(min=1)


def train(steps=30, global_batch=32):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    model = DDP(Encoder())
    decay = [p for p in model.parameters() if p.ndim >= 2]
    plain = [p for p in model.parameters() if p.ndim < 2]
    opt = torch.optim.SGD([{"params": decay, "weight_decay": 1e-3}, {"params": plain}], lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=steps)
    corpus = Corpus(steps * global_batch, seed=4)
    rows = torch.arange(steps * global_batch).view(steps, world, -1)
    for step in range(steps):
        x, y = corpus.batch(rows[step, rank])
        loss = masked_lm_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 10 == 9:
            value = loss.detach().clone()
            dist.all_reduce(value)
            if rank == 0:
                print(f"[{step + 1}/{steps}] mlm loss {value.item():.4f} lr {sched.get_last_lr()[0]:.3f}")
    return model


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model = train()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), "mlm.pt")
    dist.destroy_process_group()
