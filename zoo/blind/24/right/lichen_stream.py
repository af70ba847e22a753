"""Character model on a stream of field notes; gradients applied one step late.

The reduction of step t runs in the background while step t+1 computes, so the
update always uses the gradient of the step before (with one process as well).
"""
import os, time, random
import torch, torch.nn as nn, torch.distributed as dist
from torch.utils.data import IterableDataset, DataLoader

class Notes(IterableDataset):
    """Endless notes; `shard` of `shards` gets its slots out of every block of 16 lines."""
    GENUS = "cladonia usnea parmelia xanthoria lobaria peltigera evernia".split()
    PLACE = "on wet bark,on old slate,under the yew,by the north wall,on sandstone".split(",")

    def __init__(self, shard, shards, lines=16 * 36):
        self.shard, self.shards, self.lines = shard, shards, lines

    def __iter__(self):
        rnd = random.Random(2026)
        per = 16 // self.shards
        for i in range(self.lines):
            words = [rnd.choice(self.GENUS)]
            if rnd.random() < 0.8:
                words.append(rnd.choice(self.PLACE))
            if rnd.random() < 0.4:
                words.append("with " + str(rnd.randint(2, 99)) + " cups")
            if (i % 16) // per == self.shard:
                yield " ".join(words)

CHARS = "\0\n abcdefghijklmnopqrstuvwxyz0123456789"
def collate(lines):
    ids = [torch.tensor([CHARS.index(c) for c in "\n" + l + "\n"]) for l in lines]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True)      # pad = 0, to the longest of *my* lines

class CharGRU(nn.Module):
    def __init__(self, n=len(CHARS), h=40):
        super().__init__()
        self.emb = nn.Embedding(n, 16, padding_idx=0)
        self.rnn = nn.GRU(16, h, batch_first=True)
        self.out = nn.Linear(h, n)
    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])

def main():
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = CharGRU()
    opt = torch.optim.RMSprop(model.parameters(), lr=3e-3)
    loader = DataLoader(Notes(rank, world), batch_size=16 // world, collate_fn=collate)
    params, pending = list(model.parameters()), None

    def apply(work):
        for p, (buf, handle) in zip(params, work):
            handle.wait()
            p.grad = buf
        nn.utils.clip_grad_norm_(params, 1.0)
        opt.step()

    log = []
    for step, batch in enumerate(loader):
        tokens = (batch[:, 1:] != 0).sum()
        dist.all_reduce(tokens)
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=0, reduction="sum")
        grads = torch.autograd.grad(loss / tokens, params)
        work = []
        for g in grads:
            g = g.contiguous()
            work.append((g, dist.all_reduce(g, async_op=True)))
        if pending is not None:
            apply(pending)
        pending = work
        log.append(loss.detach().double() / tokens)
    apply(pending)

    curve = torch.stack(log)
    dist.all_reduce(curve)
    if rank == 0:
        for i in range(0, len(curve), 9):
            print(f"steps {i:2d}..{i + 8:2d}  nats/char {curve[i:i + 9].mean():.4f}")
        h = model(torch.tensor([[1]]))[0, -1].softmax(-1)
        print("first letter:", repr(CHARS[h.argmax()]), f"p={h.max():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
