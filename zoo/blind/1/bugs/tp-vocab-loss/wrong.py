import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

VOCAB, DIM, CTX, BATCH = 40, 32, 32, 8


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_in = nn.Linear(DIM, 4 * DIM)
        self.w_out = nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        return self.w_out(F.gelu(self.w_in(x)))


class Model(nn.Module):
    """Embeds a token with its two predecessors and predicts the following one."""

    def __init__(self, layers=2):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.ffn = nn.ModuleList(FeedForward() for _ in range(layers))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        e = self.emb(ids)
        h = e + 0.5 * torch.roll(e, 1, dims=1) + 0.25 * torch.roll(e, 2, dims=1)
        for f in self.ffn:
            h = h + f(h)
        return self.head(h)


def parallelize(model, mesh):
    for f in model.ffn:
        parallelize_module(f, mesh, {"w_in": ColwiseParallel(), "w_out": RowwiseParallel()})
    plan = {"head": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}
    return parallelize_module(model, mesh, plan)


def sequence_chunk_loss(logits, labels, mesh):
    """Every rank evaluates the loss on its own slice of the sequence, to keep the softmax small."""
    n, r = mesh.size(), mesh.get_local_rank()
    local = logits.to_local()
    local = local.chunk(n, dim=1)[r]
    target = labels.chunk(n, dim=1)[r]
    return F.cross_entropy(local.flatten(0, 1), target.flatten(), reduction="sum") / labels.numel()


def batches(n):
    g = torch.Generator().manual_seed(8)
    table = torch.randint(0, VOCAB, (VOCAB, 2), generator=g)
    for _ in range(n):
        ids = torch.zeros(BATCH, CTX + 1, dtype=torch.long)
        ids[:, 0] = torch.randint(0, VOCAB, (BATCH,), generator=g)
        coin = (torch.rand(BATCH, CTX, generator=g) < 0.2).long()
        for t in range(CTX):
            ids[:, t + 1] = table[ids[:, t], coin[:, t]]
        yield ids[:, :-1], ids[:, 1:]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    model = parallelize(Model(), mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9, foreach=False)
    for step, (ids, labels) in enumerate(batches(25)):
        loss = sequence_chunk_loss(model(ids), labels, mesh)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if dist.get_rank() == 0 and step % 6 == 0:
            print(f"step {step:2d} loss {shown.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
