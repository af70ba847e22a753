"""Language model with tied embeddings in a hand-written GPipe pipeline."""
import os
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

VOCAB, DIM, SEQ = 18, 20, 10
LAYERS, MICRO, MICRO_SIZE = 4, 4, 8
stage = int(os.environ.get("RANK", 0))
stages = int(os.environ.get("WORLD_SIZE", 1))
if stages > 1:
    dist.init_process_group("gloo")
first, last = stage == 0, stage == stages - 1
tied_group = dist.new_group([0, stages - 1]) if stages > 1 else None


class Mixer(nn.Module):
    """Causal average over the past, then an MLP."""

    def __init__(self):
        super().__init__()
        self.past = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        steps = torch.arange(1, x.shape[1] + 1).view(1, -1, 1)
        x = x + self.past(x.cumsum(1) / steps)
        return x + self.mlp(self.norm(x))


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        embedding = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(embedding.weight, std=0.3)
        layers = [Mixer() for _ in range(LAYERS)]
        final = nn.LayerNorm(DIM)
        per_stage = LAYERS // stages
        self.layers = nn.Sequential(*layers[stage * per_stage:(stage + 1) * per_stage])
        if first or last:
            self.embedding = embedding
        if last:
            self.final = final

    def forward(self, x):
        if first:
            x = self.embedding(x)
        x = self.layers(x)
        if last:
            x = F.linear(self.final(x), self.embedding.weight)
        return x


def run_pipeline(model, tokens):
    inputs, outputs, losses = [], [], []
    for m in range(MICRO):
        micro = tokens[m * MICRO_SIZE:(m + 1) * MICRO_SIZE]
        if first:
            x = micro[:, :-1]
        else:
            x = torch.empty(MICRO_SIZE, SEQ, DIM)
            dist.recv(x, stage - 1)
            x.requires_grad_()
        y = model(x)
        if last:
            losses.append(F.cross_entropy(y.flatten(0, 1), micro[:, 1:].flatten()) / MICRO)
        else:
            dist.send(y.detach(), stage + 1)
        inputs.append(x)
        outputs.append(y)
    for m in range(MICRO):
        if last:
            losses[m].backward()
        else:
            grad = torch.empty_like(outputs[m])
            dist.recv(grad, stage + 1)
            outputs[m].backward(grad)
        if not first:
            dist.send(inputs[m].grad, stage - 1)
    return sum(loss.detach() for loss in losses) if last else torch.zeros(())


def sync_tied_weight(model):
    if stages > 1 and (first or last):
        weight = model.embedding.weight
        dist.all_reduce(weight.grad, group=tied_group)
        weight.grad /= dist.get_world_size(tied_group)


def main():
    torch.manual_seed(17)
    model = Stage()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9, nesterov=True)
    gen = torch.Generator().manual_seed(0)
    table = torch.randperm(VOCAB, generator=gen)
    for step in range(30):
        start = torch.randint(0, VOCAB, (MICRO * MICRO_SIZE, 1), generator=gen)
        rows = [start]
        for _ in range(SEQ):
            noise = (torch.rand(start.shape, generator=gen) < 0.15).long()
            rows.append((table[rows[-1]] + noise) % VOCAB)
        optimizer.zero_grad()
        loss = run_pipeline(model, torch.cat(rows, 1))
        sync_tied_weight(model)
        optimizer.step()
        if stages > 1:
            dist.broadcast(loss, stages - 1)
        if stage == 0 and step % 6 == 5:
            print(f"step {step + 1}: loss {loss.item():.10f}  "
                  f"embedding {model.embedding.weight.detach().norm().item():.10f}")
    if stages > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
