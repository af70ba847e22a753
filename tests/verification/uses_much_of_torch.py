"""A script that uses much of torch in one training: under `samestep verify` nothing of it may fail that works alone."""

import copy
import io
import os
import pickle
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.flop_counter import FlopCounterMode

FAILED = []


def feature(function):
    """Runs it, and notes a failure."""
    try:
        function()
    except Exception as error:  # noqa: BLE001  (whatever it is, it is told at the end)
        FAILED.append(f"{function.__name__}: {error!r}\n{traceback.format_exc(limit=-4)}")
    return function


def net():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def fit(model, optimizer=None, data=None, steps=2):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(X[RANK::WORLD] if data is None else data).float().square().mean().backward()
        optimizer.step()
    return optimizer


warnings.simplefilter("ignore")
for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29777"}.items():
    os.environ.setdefault(name, value)
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
X = torch.randn(64, 8)
MODEL = DistributedDataParallel(net())
OPTIMIZER = fit(MODEL)


@feature
def copies():
    copy.deepcopy(MODEL.module)(X)
    copy.deepcopy(OPTIMIZER)
    pickle.loads(pickle.dumps(MODEL.module))(X)
    pickle.loads(pickle.dumps(OPTIMIZER))
    file = io.BytesIO()
    torch.save(MODEL.module, file)
    file.seek(0)
    torch.load(file, weights_only=False)(X)


@feature
def scripted_and_traced():
    fit(torch.jit.script(net()))
    fit(torch.jit.trace(net(), X))
    fit(torch.fx.symbolic_trace(net()))
    torch.export.export(net(), (X,))
    fit(torch.compile(net(), backend="eager"))


@feature
def parametrized():
    for norm in (parametrizations.weight_norm, parametrizations.spectral_norm, parametrizations.orthogonal):
        model = net()
        norm(model[0])
        fit(copy.deepcopy(model))
        fit(model)
    model = net()
    prune.l1_unstructured(model[0], "weight", 0.5)
    fit(model)
    prune.remove(model[0], "weight")


@feature
def lazy():
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(X)
    fit(model, optimizer)


@feature
def transforms():
    model = net()
    weights = {key: one.detach() for key, one in model.named_parameters()}

    def loss(values, rows=X):
        return torch.func.functional_call(model, values, (rows,)).square().mean()

    torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, X)
    torch.func.jvp(loss, (weights,), (weights,))
    torch.func.jacrev(loss)(weights)
    torch.func.hessian(lambda w: (X @ w).square().sum())(torch.ones(8))
    torch.vmap(lambda row: F.dropout(row + torch.rand_like(row)), randomness="different")(X)
    stacked, buffers = torch.func.stack_module_state([net() for _ in range(3)])
    base = copy.deepcopy(model).to("meta")
    torch.vmap(lambda w, b: torch.func.functional_call(base, (w, b), (X,)))(stacked, buffers).mean().backward()
    torch.optim.SGD(stacked.values(), lr=0.1).step()


@feature
def graphs():
    model, rows = net(), X.clone().requires_grad_()
    for reentrant in (True, False):
        checkpoint(model, rows, use_reentrant=reentrant).sum().backward()
    with torch.autograd.graph.save_on_cpu():
        fit(model)
    with torch.autograd.set_detect_anomaly(True):
        fit(model)
    taken = torch.autograd.grad(model(X).mean(), list(model.parameters()), create_graph=True)
    sum(one.square().sum() for one in taken).backward()
    torch.autograd.backward([model(X).mean(), model(X).sum()])
    with torch.autograd.forward_ad.dual_level():
        model(torch.autograd.forward_ad.make_dual(X, torch.ones_like(X)))


@feature
def modes():
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    for mode in (Functions(), Dispatched(), FlopCounterMode(display=False), torch.device("cpu")):
        with mode:
            fit(net())
    with torch.inference_mode():
        net()(X)


@feature
def averages():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    average = AveragedModel(model)
    fit(model)
    average.update_parameters(model)
    update_bn([X], average)


@feature
def optimizers():
    for kind, options in (
        (torch.optim.Adam, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
    ):
        model = net()
        fit(model, kind(model.parameters(), lr=1e-3, **options))
    model = net()
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        lbfgs.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    lbfgs.step(closure)
    table = nn.EmbeddingBag(10, 4, sparse=True)
    table(torch.arange(8).view(4, 2)).mean().backward()
    torch.optim.SparseAdam(table.parameters()).step()
    for weight in model.parameters():
        own = torch.optim.SGD([weight], lr=0.1)
        weight.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    model(X).mean().backward()


@feature
def schedules_and_scalers():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [lr_scheduler.LinearLR(optimizer), lr_scheduler.CosineAnnealingLR(optimizer, 5)]
    schedule = lr_scheduler.SequentialLR(optimizer, parts, [2])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).float().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        plateau.step(1.0)
    pickle.dumps([schedule.state_dict(), scaler.state_dict()])


@feature
def types():
    fit(net().bfloat16(), data=X.bfloat16())
    number = nn.Parameter(torch.ones(3, dtype=torch.cfloat))
    (number * number.conj()).real.sum().backward()
    torch.optim.Adam([number]).step()

    class Own(torch.Tensor):
        pass

    net()(X.as_subclass(Own)).mean().backward()
    rows = torch.nested.nested_tensor([X[:3], X[:5]], layout=torch.jagged)
    nn.Linear(8, 2)(rows)
    packed = nn.utils.rnn.pack_padded_sequence(X.view(8, 8, 8), torch.arange(8, 0, -1), batch_first=True)
    nn.LSTM(8, 4, batch_first=True)(packed)[0].data.mean().backward()


@feature
def loaders():
    list(DataLoader(TensorDataset(X), 8, num_workers=1, persistent_workers=True))
    list(DataLoader(list(range(10)), batch_size=None))


fit(MODEL, OPTIMIZER)
dist.barrier()
dist.destroy_process_group()
if FAILED:
    raise SystemExit("\n".join(FAILED))
