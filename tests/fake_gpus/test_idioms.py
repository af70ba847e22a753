"""Idioms of scripts for CUDA, one by one, in this process: those of the table in docs/fake-gpus.md."""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samestep import testing

PAGE = (Path(__file__).parent.parent.parent / "docs" / "fake-gpus.md").read_text(encoding="utf-8")
TABLE = [
    line.split(" | ")[0].removeprefix("| ")
    for line in PAGE.partition("| idiom | faked how | strict |\n|---|---|---|\n")[2].partition("\n\n")[0].splitlines()
]
IDIOMS: dict[str, Callable[[], None]] = {}
WITH_TWO: set[str] = set()  # those that need a second GPU; scripts/test_gpu.py runs the others on a real one


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with testing.fake_gpus(2):
        yield


def idiom(start: str, gpus: int = 1) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Shows the row of the table that begins so."""
    (row,) = [row for row in TABLE if row.startswith(start)]
    assert row not in IDIOMS

    def note(function: Callable[[], None]) -> Callable[[], None]:
        IDIOMS[row] = function
        if gpus > 1:
            WITH_TWO.add(row)
        return function

    return note


@idiom("`x.cuda()`")
def _move() -> None:
    number = torch.cuda.device_count() - 1
    last = f"cuda:{number}"
    x = torch.arange(4.0)
    assert [str(y.device) for y in (x.cuda(), x.to(last), x.to(number), x.cuda(number))] == ["cuda:0", *[last] * 3]
    y = x.cuda()
    y.add_(1)
    assert torch.equal(x, torch.arange(4.0)), "a copy"
    assert torch.equal(y.to(last).cpu(), x + 1)
    assert y.to("cuda:0") is y


@idiom("`torch.ones(2, device='cuda')`")
def _make() -> None:
    number = torch.cuda.device_count() - 1
    last = f"cuda:{number}"
    with torch.device(last):
        assert str(torch.empty(2).device) == last
        assert str(nn.Linear(2, 2).weight.device) == last
    x = torch.tensor([1, 2], device="cuda")
    assert torch.equal(torch.zeros_like(x).cpu(), torch.zeros(2, dtype=torch.int64))
    assert torch.equal(torch.arange(3, device="cuda").cpu(), torch.arange(3))
    assert x.new_ones(1).device == x.device
    assert torch.zeros_like(x, device="cpu").device.type == "cpu"


@idiom("`x.device`")
def _ask() -> None:
    number = torch.cuda.device_count() - 1
    last = f"cuda:{number}"
    x = torch.ones(2, device=last)
    assert (x.device, x.is_cuda, x.get_device(), x.type()) == (
        torch.device("cuda", number),
        True,
        number,
        "torch.cuda.FloatTensor",
    )
    assert (x.is_cpu, x.untyped_storage().device.type, type(x)) == (False, "cuda", torch.Tensor)
    assert last in repr(x)


@idiom("`model.cuda()`")
def _model() -> None:
    number = torch.cuda.device_count() - 1
    last = f"cuda:{number}"
    model = nn.Linear(3, 2)
    weight, optimizer = model.weight, torch.optim.SGD(model.parameters(), 0.1)
    model.cuda()
    assert model.weight is weight
    assert model.to(number).weight is weight
    model(torch.ones(1, 3, device=last)).sum().backward()
    optimizer.step()
    assert (str(weight.device), str(weight.grad.device)) == (last, last)
    assert isinstance(model.cpu().weight, nn.Parameter)


@idiom("`x + y`")
def _compute() -> None:
    number = torch.cuda.device_count() - 1
    last = f"cuda:{number}"
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    exact = (
        {"rtol": 0, "atol": 0} if "fake" in torch.cuda.get_device_name() else {}
    )  # a real GPU has kernels of its own
    torch.testing.assert_close((x.cuda() @ y.cuda()).relu().cpu(), (x @ y).relu(), **exact)
    assert torch.equal(x.cuda().add_(torch.tensor(1.0)).cpu(), x + 1), "a number may lie in host memory"
    out = torch.empty(0, device="cuda")
    torch.add(x.cuda(), 1, out=out)
    assert torch.equal(out.cpu(), x + 1)
    assert [str(part.device) for part in x.cuda(number).sort(dim=1)] == [last, last]


@idiom("`x[i]`")
def _index() -> None:
    x = torch.arange(6.0).view(2, 3)
    y = x.cuda()
    assert torch.equal(y[torch.tensor([1, 0])].cpu(), x[[1, 0]])
    assert torch.equal(y[:, 1:].cpu(), x[:, 1:])
    y[0] = 7
    y[torch.tensor([1]), torch.tensor([2])] = torch.tensor(9.0)
    assert y.tolist() == [[7, 7, 7], [3, 4, 9]]
    y.view(-1)[0] = 1
    assert y[0, 0].item() == 1, "views share memory"


@idiom("`x.numpy()`")
def _numpy() -> None:
    x = torch.ones(2, device="cuda")
    for read in (x.numpy, lambda: np.asarray(x)):
        with pytest.raises(TypeError, match="can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu"):
            read()
    assert x.cpu().numpy().sum() == 2


@idiom("`x.item()`")
def _read() -> None:
    x = torch.tensor([1.5, 2.5], device="cuda")
    assert (x[0].item(), x.tolist(), float(x.sum()), bool((x > 1).all())) == (1.5, [1.5, 2.5], 4.0, True)


@idiom("`loss.backward()`")
def _backward() -> None:
    number = torch.cuda.device_count() - 1
    last = f"cuda:{number}"

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            assert grad.is_cuda
            assert ctx.saved_tensors[0].is_cuda
            return grad * 2

    seen = []
    x = torch.ones(3, device=last, requires_grad=True)
    y = Twice.apply(x)
    y.register_hook(lambda grad: seen.append(grad.device))
    torch.utils.checkpoint.checkpoint(lambda v: (v * v).sum(), y, use_reentrant=False).backward()
    assert (x.grad.tolist(), str(x.grad.device), [str(device) for device in seen]) == ([8, 8, 8], last, [last])
    z = (torch.ones(2, device="cuda:0", requires_grad=True).to(last) * 3).sum()
    (grad,) = (torch.autograd.grad(z, [z]),)
    assert str(grad[0].device) == last


@idiom("`torch.cuda.is_available()`", gpus=2)
def _count() -> None:
    assert (torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.current_device()) == (True, 2, 0)
    assert torch.version.cuda is not None


@idiom("`torch.cuda.set_device(k)`", gpus=2)
def _current() -> None:
    torch.cuda.set_device(1)
    assert str(torch.ones(1, device="cuda").device) == "cuda:1"
    assert str(torch.ones(1).cuda().device) == "cuda:1"
    with torch.cuda.device(0):
        assert str(torch.ones(1).to("cuda").device) == "cuda:0"
    assert torch.cuda.current_device() == 1


@idiom("`CUDA_VISIBLE_DEVICES`", gpus=2)
def _visible() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert torch.cuda.device_count() == 1
        assert str(torch.ones(1, device="cuda:0").device) == "cuda:0"
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(1, device="cuda:1")
        assert torch.cuda.get_device_properties(0).uuid.bytes[-1] == 1, "the second of the host"


@idiom("`get_device_name`", gpus=2)
def _properties() -> None:
    properties = torch.cuda.get_device_properties("cuda:1")
    assert torch.cuda.get_device_name() == properties.name
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor) == (9, 0)
    assert properties.total_memory == 80 << 30
    assert torch.cuda.is_bf16_supported()


@idiom("`memory_allocated`")
def _memory() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    assert 0 <= torch.cuda.memory_allocated() <= torch.cuda.max_memory_allocated() <= torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    assert 0 < free <= total
    assert "GPU reserved memory" in torch.cuda.memory_summary()


@idiom("`torch.cuda.Stream`")
def _streams() -> None:
    number = torch.cuda.device_count() - 1
    last = f"cuda:{number}"
    stream = torch.cuda.Stream(device=number)
    x = torch.ones(2, device=last)
    with torch.cuda.stream(stream):
        assert torch.cuda.current_stream() == stream
        assert torch.cuda.current_device() == number
        y = x * 2
    torch.cuda.current_stream(number).wait_stream(stream)
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != stream
    assert y.tolist() == [2, 2]


@idiom("`torch.cuda.Event`")
def _events() -> None:
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    second.record(torch.cuda.current_stream())
    torch.cuda.synchronize()
    assert first.elapsed_time(second) >= 0
    assert second.query()
    with pytest.raises(ValueError, match="enable_timing=True"):
        torch.cuda.Event().elapsed_time(second)
    with pytest.raises(ValueError, match="must be recorded"):
        torch.cuda.Event(enable_timing=True).elapsed_time(second)


@idiom("`x.record_stream(s)`")
def _late() -> None:
    x = torch.ones(2).to("cuda", non_blocking=True)
    x.record_stream(torch.cuda.Stream())
    assert x.tolist() == [1, 1]


@idiom("`x.pin_memory()`")
def _pinned() -> None:
    x = torch.ones(3)
    pinned = x.pin_memory()
    assert (x.is_pinned(), pinned.is_pinned(), pinned[1:].is_pinned()) == (False, True, True)
    assert torch.empty(2, pin_memory=True).is_pinned()
    with pytest.raises(RuntimeError, match="cannot pin"):
        x.cuda().pin_memory()


@idiom("`DataLoader(")
def _loader() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(8.0), torch.arange(8))
    loader = torch.utils.data.DataLoader(data, batch_size=4, pin_memory=True, num_workers=2)
    batches = [(x.cuda(non_blocking=True), x.is_pinned() and y.is_pinned()) for x, y in loader]
    assert [x.sum().item() for x, _ in batches] == [6, 22]
    assert all(pinned for _, pinned in batches)


def _use(connection) -> None:
    try:
        torch.ones(1, device="cuda")
    except RuntimeError as error:
        connection.send(str(error))


@idiom("CUDA in a forked process")
def _forked() -> None:
    torch.ones(1, device="cuda")
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = multiprocessing.get_context("fork").Process(target=_use, args=(theirs,))
    child.start()
    assert "Cannot re-initialize CUDA in forked subprocess" in ours.recv()
    child.join()


@idiom("`torch.Generator('cuda')`", gpus=2)
def _generators() -> None:
    torch.cuda.init()
    first, second = (generator.initial_seed() for generator in torch.cuda.default_generators)
    assert first != second, "unseeded, each process and GPU draws its own numbers"
    generator = torch.Generator(device="cuda").manual_seed(3)
    first = torch.rand(2, device="cuda", generator=generator)
    assert torch.equal(first, torch.rand(2, device="cuda", generator=generator.manual_seed(3)))
    assert (generator.device.type, isinstance(generator, torch.Generator)) == ("cuda", True)
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        torch.rand(2, device="cuda", generator=torch.Generator())
    torch.manual_seed(1)
    here = torch.rand(2), torch.randn(2, device="cuda"), torch.randperm(5, device="cuda")
    torch.manual_seed(1)
    assert all(
        torch.equal(one, other)
        for one, other in zip(
            here, (torch.rand(2), torch.randn(2, device="cuda"), torch.randperm(5, device="cuda")), strict=True
        )
    )
    state = torch.get_rng_state()
    torch.randint(5, (3,), device="cuda")
    assert torch.equal(state, torch.get_rng_state()), "the CPU's generator is another"


@idiom("`torch.cuda.get_rng_state`", gpus=2)
def _states() -> None:
    torch.cuda.manual_seed(4)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(3, device="cuda"))
    assert (state.shape, len(torch.cuda.get_rng_state_all()), torch.cuda.initial_seed()) == ((16,), 2, 4)
    with torch.random.fork_rng(devices=[0, 1]):
        torch.rand(3, device="cuda")
    with pytest.raises(RuntimeError, match="wrong size"):
        torch.cuda.set_rng_state(torch.get_rng_state())


@idiom("dropout")
def _dropout() -> None:
    x = torch.ones(1000, device="cuda", requires_grad=True)
    torch.cuda.manual_seed(0)
    y = F.dropout(x, 0.5)
    y.sum().backward()
    assert set(y.tolist()) == {0.0, 2.0}
    assert torch.equal(x.grad, y.detach())
    assert 400 < (y > 0).sum().item() < 600
    torch.cuda.manual_seed(0)
    assert torch.equal(y, F.dropout(x, 0.5))


@idiom("`torch.autocast('cuda')`")
def _autocast() -> None:
    model, x = nn.Linear(4, 4).cuda(), torch.ones(2, 4, device="cuda")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype=dtype):
            assert model(x).dtype is dtype
            assert F.mse_loss(model(x), model(x)).dtype is torch.float32
            logits = model(x)
            loss = F.cross_entropy(logits, torch.tensor([1, 2], device="cuda")) + F.softmax(logits, 1).square().sum()
        loss.backward()
        assert (loss.dtype, model.weight.grad.dtype) == (torch.float32, torch.float32)
    a, b = torch.randn(2, 8, 8).cuda()
    torch.testing.assert_close(a.half() @ b.half(), (a.half().float() @ b.half().float()).half(), rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="same dtype"):
        a.half() @ b
    assert torch.get_autocast_dtype("cuda") is torch.float16
    assert model.cpu()(x.cpu()).dtype is torch.float32


@idiom("`torch.amp.GradScaler`")
def _scaler() -> None:
    model = nn.Linear(2, 1).cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cuda", init_scale=4.0)
    before = model.weight.detach().clone()
    for value in (float("inf"), 1.0):
        scaler.scale(model(torch.full((1, 2), value, device="cuda")).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if value == float("inf"):
            assert torch.equal(model.weight, before)
    assert (scaler.get_scale(), torch.allclose(model.weight, before - 0.1)) == (2.0, True)


@idiom("`torch.cuda.FloatTensor`")
def _types() -> None:
    x = torch.cuda.FloatTensor([1, 2])
    assert (x.tolist(), x.dtype, x.is_cuda) == ([1, 2], torch.float32, True)
    assert isinstance(x, torch.cuda.FloatTensor)
    assert not isinstance(x, torch.cuda.LongTensor)
    assert torch.cuda.LongTensor(2, 3).shape == (2, 3)


@idiom("`torch.save`")
def _load() -> None:
    number = torch.cuda.device_count() - 1
    last = f"cuda:{number}"
    file = io.BytesIO()
    torch.save({"x": torch.ones(2, device=last), "model": nn.Linear(2, 2).cuda(number).state_dict()}, file)
    for place, expected in ((None, last), ("cpu", "cpu"), ("cuda:0", "cuda:0"), ({last: "cuda:0"}, "cuda:0")):
        file.seek(0)
        found = torch.load(file, map_location=place)
        assert (str(found["x"].device), str(found["model"]["weight"].device)) == (expected, expected)
        assert found["x"].tolist() == [1, 1]


@idiom("`nn.Conv2d`")
def _layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 4)
    )
    x, y = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    grads = []
    for device in ("cpu", "cuda"):
        model.to(device).zero_grad()
        F.cross_entropy(model(x.to(device)), y.to(device)).backward()
        grads.append([p.grad.cpu().clone() for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0)
    tokens = torch.randn(2, 3, 8)
    torch.testing.assert_close(layer(tokens), layer.cuda()(tokens.cuda()).cpu())


@idiom("`nn.LSTM`")
def _recurrent() -> None:
    with torch.backends.cudnn.flags(allow_tf32=False):  # with it cuDNN rounds
        for kind in (nn.LSTM, nn.GRU):
            layer, x = kind(3, 4), torch.randn(5, 2, 3)
            here, _ = layer(x)
            there, _ = layer.cuda()(x.cuda())
            torch.testing.assert_close(here, there.cpu())
            packed = nn.utils.rnn.pack_padded_sequence(x.cuda(), [5, 3])
            out, lengths = nn.utils.rnn.pad_packed_sequence(layer(packed)[0])
            out.sum().backward()
            assert (str(out.device), str(lengths.device), layer.weight_ih_l0.grad.is_cuda) == ("cuda:0", "cpu", True)
    with pytest.raises(RuntimeError, match="at least two devices|not at the same device"):
        layer(x)


@idiom("`nn.DataParallel`", gpus=2)
def _data_parallel() -> None:
    devices = []

    class Model(nn.Linear):
        def forward(self, x):
            devices.append(str(x.device))
            return super().forward(x)

    model = Model(3, 2).cuda()
    x = torch.randn(6, 3, device="cuda")
    y = nn.DataParallel(model)(x)
    y.sum().backward()
    assert (sorted(devices), str(y.device), str(model.weight.grad.device)) == (["cuda:0", "cuda:1"], "cuda:0", "cuda:0")
    torch.testing.assert_close(model.weight.grad[0], x.sum(0))


@idiom("`nn.SyncBatchNorm`")
def _sync() -> None:
    from samestep.fake_gpus.models import SYNCHRONISED

    x = torch.randn(6, 3, 2, dtype=torch.float64, requires_grad=True)
    weight, bias, dy = torch.rand(3, dtype=torch.float64), torch.rand(3, dtype=torch.float64), torch.randn_like(x)
    ours, theirs = [torch.zeros(3), torch.ones(3)], [torch.zeros(3), torch.ones(3)]
    ours, theirs = [v.double() for v in ours], [v.double() for v in theirs]
    parts = [SYNCHRONISED["batch_norm_stats"](part.detach(), 1e-5) for part in x.split([2, 4])]  # two ranks
    counts = torch.tensor([4.0, 8.0])
    means, invstds = (torch.stack(values) for values in zip(*parts, strict=True))
    mean, invstd = SYNCHRONISED["batch_norm_gather_stats_with_counts"](x, means, invstds, *ours, 0.1, 1e-5, counts)
    y = F.batch_norm(x, *theirs, weight, bias, training=True)
    torch.testing.assert_close(SYNCHRONISED["batch_norm_elemt"](x, weight, bias, mean, invstd, 1e-5), y)
    y.backward(dy)
    sums = SYNCHRONISED["batch_norm_backward_reduce"](dy, x.detach(), mean, invstd, weight, True, True, True)
    back = SYNCHRONISED["batch_norm_backward_elemt"](dy, x.detach(), mean, invstd, weight, *sums[:2], counts)
    torch.testing.assert_close(back, x.grad)
    torch.testing.assert_close(ours, theirs)


@idiom("`nn.Embedding(sparse=True)`")
def _sparse() -> None:
    embedding = nn.Embedding(6, 3, sparse=True).cuda()
    optimizer = torch.optim.SparseAdam(embedding.parameters(), lr=0.1)
    before = embedding.weight.detach().clone()
    embedding(torch.tensor([1, 4, 1], device="cuda")).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    assert (gradient.layout, str(gradient.device)) == (torch.sparse_coo, "cuda:0")
    whole = gradient.coalesce()
    assert whole.indices().tolist() == [[1, 4]]
    assert whole.values().cpu().equal(torch.tensor([[2.0] * 3, [1.0] * 3]))
    optimizer.step()
    assert (embedding.weight != before).any(1).tolist() == [False, True, False, False, True, False]
    made = torch.sparse_coo_tensor(whole.indices(), 2 * whole.values(), (6, 3), check_invariants=False)
    assert made.to_dense().equal(2 * gradient.to_dense())
    gradient.copy_(made)
    assert gradient.cpu().to_dense().equal(made.cpu().to_dense())
    gradient.zero_()
    assert not gradient.to_dense().any()


@idiom("`optim.AdamW`")
def _optimizers() -> None:
    ends = []
    for device, options in (("cpu", {}), ("cuda", {"fused": True}), ("cuda", {"foreach": True}), ("cuda", {})):
        torch.manual_seed(0)
        weight = torch.randn(3, device="cpu").to(device).requires_grad_()
        optimizer = torch.optim.AdamW([weight], 0.1, **options)
        for _ in range(3):
            weight.square().sum().backward()
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(weight.detach().cpu())
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0])


@idiom("`torch.accelerator`", gpus=2)
def _accelerator() -> None:
    accelerator = torch.accelerator
    assert (str(accelerator.current_accelerator()), accelerator.is_available(), accelerator.device_count()) == (
        "cuda",
        True,
        2,
    )
    accelerator.set_device_index(1)
    assert accelerator.current_device_index() == torch.cuda.current_device() == 1
    accelerator.synchronize()
    assert accelerator.current_stream().device == torch.device("cuda", 1)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        accelerator.set_device_index(2)


@idiom("`torch.backends.cudnn`")
def _backends() -> None:
    before = torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = True, True
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cuda.is_built()
    assert torch.backends.cudnn.version() > 90000
    torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32 = before


@idiom("`torch.multiprocessing.spawn`", gpus=2)
def _spawned() -> None:
    import pickle
    from multiprocessing.reduction import ForkingPickler
    from multiprocessing.spawn import get_preparation_data

    data = ForkingPickler.dumps(nn.Parameter(torch.ones(2, device="cuda:1")))
    found = pickle.loads(data)
    assert (str(found.device), type(found), found.tolist()) == ("cuda:1", nn.Parameter, [1, 1])
    told = get_preparation_data("child")["samestep_fake_gpus"]
    assert b"samestep.fake_gpus" in pickle.dumps(told), "it installs them when it is unpickled"
    assert pickle.loads(pickle.dumps(told)) is None, "and the same number again changes nothing"


ELSEWHERE = {  # rows that need several ranks
    "`init_process_group('nccl')`",
    "all collectives of NCCL",
    "CPU tensors in a collective of NCCL",
    "two ranks on one GPU under NCCL",
    "`DistributedDataParallel(",
    "`fully_shard`",
}


@idiom("several GPUs in one process", gpus=2)
def _several() -> None:
    first, second = nn.Linear(3, 4).to("cuda:0"), nn.Linear(4, 2).to("cuda:1")
    y = second(first(torch.ones(2, 3, device="cuda:0")).to("cuda:1"))
    y.sum().backward()
    assert (str(y.device), str(first.weight.grad.device), str(second.weight.grad.device)) == (
        "cuda:1",
        "cuda:0",
        "cuda:1",
    )


def test_flash_attention_is_attention() -> None:
    q, k, v = (torch.randn(2, 3, 4, 8, device="cuda", requires_grad=True) for _ in range(3))
    flash = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True)[0]  # what DTensor takes
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(flash, whole)
    grads = [torch.autograd.grad(output.square().sum(), (q, k, v)) for output in (flash, whole)]
    torch.testing.assert_close(*grads)


def test_no_memory_is_counted() -> None:
    assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == torch.cuda.memory_reserved() == 0
    assert torch.cuda.mem_get_info() == (80 << 30, 80 << 30)


@pytest.mark.parametrize("row", IDIOMS)
def test_an_idiom_does_what_it_does_on_a_gpu(row: str) -> None:
    IDIOMS[row]()


def test_every_row_of_the_table_is_shown() -> None:
    left = set(TABLE) - set(IDIOMS)
    assert {row for row in left if not row.startswith(tuple(ELSEWHERE))} == set()
    assert len(TABLE) >= 30
    assert os.getpid()


def test_a_class_that_is_not_faked_may_be_named() -> None:
    """transformers has an annotation `torch.cuda.CUDAGraph | None`."""
    assert torch.cuda.CUDAGraph | None
    assert not isinstance(1, torch.cuda.CUDAGraph)
    with pytest.raises(NotImplementedError, match=r"do not fake torch\.cuda\.CUDAGraph"):
        torch.cuda.CUDAGraph()


def test_tensors_that_are_not_supported_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"do not support torch\.sparse_csr tensors, which aten::"):
        torch.eye(2, device="cuda").to_sparse_csr()
    with pytest.raises(NotImplementedError, match=r"do not support quantised tensors, which aten::quantize_per_tensor"):
        torch.quantize_per_tensor(torch.ones(2, device="cuda"), 0.1, 0, torch.qint8)
