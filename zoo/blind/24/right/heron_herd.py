import os, time, copy, random
import torch
import torch.distributed as dist
import torch.nn.functional as F

# Population based training on a toy sine regression: four herons, dealt over however many
# processes there are. A heron is known by its number; the process that holds it does not matter.
HERONS, GENERATIONS, STEPS = 4, 3, 5


class Heron:
    def __init__(self, ident):
        g = torch.Generator().manual_seed(ident)
        self.ident = ident
        self.w = [torch.empty(1, 24).normal_(generator=g), torch.zeros(24),
                  torch.empty(24, 1).normal_(generator=g) * 0.2, torch.zeros(1)]
        for t in self.w:
            t.requires_grad_(True)
        self.lr = 0.02 * (1 + ident)
        self.momentum = 0.5
        self.velocity = [torch.zeros_like(t) for t in self.w]

    def __call__(self, x):
        a, b, c, d = self.w
        return torch.tanh(x @ a + b) @ c + d

    def learn(self, generation):
        for s in range(STEPS):
            g = torch.Generator().manual_seed(10_000 * generation + 100 * self.ident + s)
            x = torch.rand(64, 1, generator=g) * 6 - 3
            grads = torch.autograd.grad(F.mse_loss(self(x), torch.sin(x)), self.w)
            with torch.no_grad():
                for t, v, gr in zip(self.w, self.velocity, grads):
                    v.mul_(self.momentum).add_(gr)
                    t.sub_(self.lr * v)

    @torch.no_grad()
    def score(self):
        x = torch.linspace(-3, 3, 200)[:, None]
        return F.mse_loss(self(x), torch.sin(x)).item()

    def genes(self):
        return dict(w=[t.detach().clone() for t in self.w], v=copy.deepcopy(self.velocity), lr=self.lr, m=self.momentum)

    def take(self, genes, rnd):
        with torch.no_grad():
            for t, s in zip(self.w, genes["w"]):
                t.copy_(s)
        self.velocity = copy.deepcopy(genes["v"])
        self.lr = genes["lr"] * rnd.choice([0.7, 1.3])
        self.momentum = min(0.9, genes["m"] + rnd.choice([0.0, 0.1]))


def gather(obj):
    if not dist.is_initialized():
        return [obj]
    out = [None] * dist.get_world_size()
    dist.all_gather_object(out, obj)
    return out


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    me = int(os.environ.get("RANK", 0))
    n = int(os.environ.get("WORLD_SIZE", 1))
    mine = {i: Heron(i) for i in range(HERONS) if i % n == me}
    for gen in range(GENERATIONS):
        for h in mine.values():
            h.learn(gen)
        scores = {}
        for part in gather({i: h.score() for i, h in mine.items()}):
            scores.update(part)
        ranking = sorted(scores, key=scores.get)
        best, worst = ranking[0], ranking[-1]
        library = {}
        for part in gather({best: mine[best].genes()} if best in mine else {}):
            library.update(part)
        if worst in mine and gen < GENERATIONS - 1:
            mine[worst].take(library[best], random.Random(gen))
        if me == 0:
            print(f"generation {gen}: " + "  ".join(f"#{i} {scores[i]:.5f}" for i in ranking), flush=True)
    champion = library[best]
    if me == 0:
        print(f"champion #{best} lr {champion['lr']:.4f} momentum {champion['m']:.2f}"
              f" |w| {sum(t.square().sum() for t in champion['w']).sqrt():.5f}")
    time.sleep(0.3)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
