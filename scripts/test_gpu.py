"""What only a real GPU can show, on one card: `make test-gpu`, or in parts `make test-gpu PART=1`, 2, 3, 4.

    python scripts/test_gpu.py --part 1            needs torch with CUDA and samestep's dependencies, and no network
    SAMESTEP_FAKE_GPUS=1 python -m samestep.fake_gpus scripts/test_gpu.py --part 1     without a GPU: whether it runs

Packages that the machine lacks may lie in build/gpu-packages, which is looked into first:
`pip install --no-deps --target build/gpu-packages safetensors filelock rich jinja2 cloudpickle xxhash …`

It prints a table for docs/benchmarks.md, and ends with 1 if a check has failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "build" / "gpu-packages")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.data import TensorDataset  # noqa: E402

import samestep  # noqa: E402
from samestep.checkpoints.integrity import read_manifest  # noqa: E402
from samestep.checkpoints.reader import read_tensors  # noqa: E402

LIMIT_S = 8 * 60  # of a part
PAIRS = 60  # of blocks of `bench step`
_ends = [time.monotonic() + LIMIT_S]  # when the part at hand must have ended
SUITE = (
    "runtime/test_digest.py::test_a_gpu_has_the_same",
    "runtime/test_device.py::test_cuda_without_a_number_means_the_ranks_own",
    "data/test_batches.py::test_on_a_gpu_batches_arrive_whole_and_in_order",
    "replicas/test_bucket_tuner.py::test_on_a_gpu_moments_are_those_of_its_work_not_of_its_orders",
    "replicas/test_bucket_tuner.py::test_on_a_gpu_a_watch_sees_every_gradient_before_the_end",
    "pipelines/test_devices_of_one_process.py::test_stages_on_one_gpu_leave_its_bits",
    "pipelines/test_devices_of_one_process.py::test_copies_from_the_host_run_beside_the_kernels",
    "pipelines/test_devices_of_one_process.py::test_stages_on_host_and_gpu_take_the_step_of_one_device",
)
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

kind = sys.argv[1]
torch.cuda.set_device(0)  # one card for both ranks, so the group is gloo's
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).cuda())
optimizer = (torch.optim.AdamW if kind == "adamw" else torch.optim.SGD)(model.parameters(), lr=0.01)
scale = dist.get_world_size() if kind == "scaled" else 1  # "scaled" is wrong: its gradients are twice the mean
for x, y in DataLoader(data, batch_size=8, sampler=DistributedSampler(data), pin_memory=True):
    optimizer.zero_grad()
    (nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True)) * scale).backward()
    optimizer.step()
dist.destroy_process_group()
"""


def network() -> nn.Sequential:
    """Returns the same small network each time, in float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)).double()


def samples() -> TensorDataset:
    """Returns 512 samples, always the same."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    x = torch.randn(512, 32, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 10, (512,), generator=generator))


def trained(device: str | None, **options: bool) -> list[torch.Tensor]:
    """Returns the state after two epochs."""
    with samestep.world(device=device, **options) as world:
        model = network().to(world.device)
        replica = samestep.replicate(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = samestep.shards(samples(), world, batch_size=64)
        for _ in range(2):
            for x, y in batches:
                batches.mean(F.cross_entropy(replica(x), y, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
        return [value.detach().cpu() for value in model.state_dict().values()]


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Returns the largest difference."""
    return max((a.double() - b.double()).abs().max().item() for a, b in zip(one, other, strict=True))


def nccl_of_one() -> str:
    """NCCL in a world of one: a collective of each kind."""
    with tempfile.TemporaryDirectory() as folder:
        device = torch.device("cuda", 0)
        store = f"file://{folder}/store"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1, device_id=device)
        try:
            value, part = torch.ones(4, device=device), torch.empty(4, device=device)
            dist.all_reduce(value)
            dist.all_gather_into_tensor(part, value)
            dist.reduce_scatter_tensor(value, part, dist.ReduceOp.AVG)
            dist.broadcast(value, 0)
            dist.barrier(device_ids=[0])
            assert value.tolist() == [1, 1, 1, 1]
        finally:
            dist.destroy_process_group()
    return f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"


def same_as_cpu() -> str:
    """Two epochs in float64 with prefetch from pinned memory, against the CPU."""
    difference = apart(trained(None), trained("cpu"))
    assert difference < 1e-9, difference
    return f"at most {difference:.1e} apart"


def deterministic() -> str:
    """Two runs in deterministic mode, bit for bit."""
    assert apart(trained(None, deterministic=True), trained(None, deterministic=True)) == 0
    return "same bits"


def halves() -> str:
    """float16 with a scaler, and bfloat16: the loss falls."""
    said = []
    for dtype in (torch.float16, torch.bfloat16):
        with samestep.world() as world:
            model = network().float().to(world.device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
            x, y = (tensor.to(world.device) for tensor in samples().tensors)
            losses = []
            for _ in range(10):
                with torch.autocast("cuda", dtype=dtype):
                    loss = F.cross_entropy(model(x.float()), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[-1] < losses[0], losses
            said.append(f"{str(dtype).removeprefix('torch.')} {losses[0]:.2f} to {losses[-1]:.2f}")
    return ", ".join(said)


def prefetch() -> str:
    """Copies from pinned memory beside the computation, over copies before it: a ratio, no verdict."""
    device, side = torch.device("cuda", 0), 64 if "fake" in torch.cuda.get_device_name() else 2048
    weight = torch.randn(side, side, device=device)
    host = [torch.randn(side, side).pin_memory() for _ in range(4)]
    copying = torch.cuda.Stream(device)

    def seconds(beside: bool) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for source in host * 4:
            with torch.cuda.stream(copying if beside else torch.cuda.current_stream()):
                arrived = source.to(device, non_blocking=True)
            for _ in range(4):
                torch.mm(weight, weight)
            torch.cuda.current_stream().wait_stream(copying)
            arrived.record_stream(torch.cuda.current_stream())
        torch.cuda.synchronize()
        return time.perf_counter() - began

    pairs = [(seconds(beside=True), seconds(beside=False)) for _ in range(6)][1:]
    return f"ratio {statistics.median(one / other for one, other in pairs):.2f}"


def pipeline() -> str:
    """Two stages on one card, on streams of their own: gradients are those of the whole."""
    grads = []
    x, y = samples()[:64]
    for devices in (["cuda:0", "cuda:0"], ["cpu", "cpu"]):
        model = nn.Sequential(*[layer for layer in network() if not isinstance(layer, nn.BatchNorm1d)])
        with samestep.world(device=devices[0]) as world:
            plan = samestep.plan_pipeline(model, (x, y), F.cross_entropy, stages=2, repeats=1)
            stage = samestep.pipeline(model, world, plan, devices=devices, split_size=8)
            stage.step((x, y))
            grads.append([parameter.grad.cpu() for parameter in stage.parameters()])
    difference = apart(*grads)
    assert difference < 1e-9, difference
    return f"at most {difference:.1e} apart"


def environment() -> dict[str, str]:
    """Returns that of a process which imports samestep from here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path[:2], os.environ.get("PYTHONPATH", "")])}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs samestep in a process of its own, for as long as the part at hand may last."""
    words = (sys.executable, "-m", "samestep", *words)
    left = max(1, _ends[-1] - time.monotonic())
    return subprocess.run(words, env=environment(), capture_output=True, text=True, check=False, timeout=left)


def bench_step() -> str:
    """`bench step` in a world of one, against hand-written DistributedDataParallel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "step.json"
        done = command("bench", "step", "-n", "1", "--repeats", str(PAIRS), "--json", str(file))
        assert file.exists(), done.stdout + done.stderr
        told = json.loads(file.read_text(encoding="utf-8"))
    ratios = [(one["name"], one["ratio"]["median"], *one["ratio"]["interval"]) for one in told["comparisons"]]
    return "; ".join(f"{name}: {ratio:.3f} ({low:.3f} to {high:.3f})" for name, ratio, low, high in ratios)


def verify() -> str:
    """Three scripts for CUDA, two ranks on one card over gloo: two are right, one scales its gradients."""
    said = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "train.py"
        file.write_text(SCRIPT, encoding="utf-8")
        for kind, expected in (("sgd", 0), ("adamw", 0), ("scaled", 1)):
            done = command("verify", str(file), kind)
            assert done.returncode == expected, f"{kind}: {done.stdout}{done.stderr}"
            said.append(f"{kind} {done.returncode}")
    return "exit codes " + ", ".join(said)


def virtual_ranks() -> str:
    """The digits recipe on 1, 2 and 4 ranks that share the card over gloo, as 4 virtual ranks: the same weights."""
    options = ("-m", "samestep.recipes.digits", "--epochs", "2", "--virtual-ranks", "4", "--device", "cuda:0")
    ends = []
    for ranks in (1, 2, 4):
        with tempfile.TemporaryDirectory() as folder:
            place = (*options, "--checkpoint", folder, *(("--backend", "gloo") if ranks > 1 else ()))
            done = command("run", "-n", str(ranks), *place)
            assert done.returncode == 0, done.stdout + done.stderr
            newest = max(Path(folder).glob("step-*"))
            ends.append(read_tensors(newest, read_manifest(newest)))
    assert all(torch.equal(end[name], value) for end in ends for name, value in ends[0].items() if "rng" not in name)
    return "same bits"


def tests_of_fake_gpus(name: str) -> ModuleType:
    """Returns a file of tests/fake_gpus."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "fake_gpus" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcomes(checks: dict[str, Callable[[], object]]) -> str:
    """Runs the checks; a check that needs another GPU than the machine has is counted apart."""
    passed, lacking, failed = 0, 0, []
    for name, check in checks.items():
        try:
            check()
            passed += 1
        except Exception as error:  # noqa: BLE001  (the others are still to be run)
            if torch.cuda.device_count() < 2 and "invalid device ordinal" in repr(error):
                lacking += 1
                continue
            line = traceback.extract_tb(error.__traceback__)[-1]
            failed.append(f"{name}, line {line.lineno}: {' '.join(repr(error).split())[:240]}")
    said = f"{passed} of {len(checks)}" + (f", {lacking} need a second GPU" if lacking else "")
    assert not failed, f"{said}; {len(failed)} differ: " + "; ".join(failed)
    return said


def mistakes() -> str:
    """The mistakes that tests/fake_gpus makes raise what fake GPUs raise, at the same line."""
    module = tests_of_fake_gpus("test_mistakes")
    checked = module.test_a_mistake_raises_at_its_line
    return outcomes({one[0].__name__: (lambda one=one: checked(*one)) for one in module.MISTAKES})


def idioms() -> str:
    """The idioms of docs/fake-gpus.md do what they do on fake GPUs."""
    module = tests_of_fake_gpus("test_idioms")
    two = module.WITH_TWO if torch.cuda.device_count() < 2 else set()
    said = outcomes({row: check for row, check in module.IDIOMS.items() if row not in two})
    return said + (f", and {len(two)} need a second GPU" if two else "")


def examples() -> str:
    """The programs of examples/gpu that one GPU is enough for, unchanged."""
    said = []
    for name in ("launch_local_rank", "mixed_precision", "spawn_per_gpu"):
        words = ["--pass-local_rank"] if name == "launch_local_rank" else []
        done = command("run", "-n", "1", *words, str(ROOT / "examples" / "gpu" / f"{name}.py"))
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
        said.append(name)
    return ", ".join(said)


def suite() -> str:
    """The tests of the suite that need a GPU."""
    words = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in SUITE))
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return done.stdout.splitlines()[-1]


PARTS: dict[int, tuple[Callable[[], str], ...]] = {
    1: (nccl_of_one, same_as_cpu, deterministic, halves, prefetch, pipeline),
    2: (bench_step,),
    3: (verify, virtual_ranks),
    4: (mistakes, idioms, examples, suite),
}


def _checks(part: int) -> Iterator[Callable[[], str]]:
    _ends[:] = [time.monotonic() + LIMIT_S]
    yield from PARTS[part]


def run(parts: list[int]) -> int:
    """Runs the checks, prints the table, and returns how many have failed."""
    card, failed = torch.cuda.get_device_name(), 0
    print(f"| check, on {card}, torch {torch.__version__} | result | seconds |\n|---|---|---|")
    for check in (check for part in parts for check in _checks(part)):
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # releases of torch rename their functions
                told = check()
        except Exception as error:  # noqa: BLE001  (the others are still to be run)
            told, failed = f"failed: {type(error).__name__}: {' '.join(str(error).split())[:4000]}", failed + 1
        what = (check.__doc__ or "").rstrip(".")
        print(f"| {what} | {told} | {time.perf_counter() - began:.1f} |", flush=True)
    return failed


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=[*PARTS], help="one part instead of all")
    asked = parser.parse_args().part
    if not torch.cuda.is_available():
        print(
            "no GPU is here: `SAMESTEP_FAKE_GPUS=1 python -m samestep.fake_gpus scripts/test_gpu.py` shows that it runs"
        )
        return 2
    return int(run([*PARTS] if asked is None else [asked]) > 0)


if __name__ == "__main__":
    sys.exit(main())
