"""samestep's own code for GPUs, on fake ones: what a GPU refuses is refused, and training is that of CPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import samestep
from samestep import testing
from samestep.doctor import step, trial
from samestep.errors import DeviceError, NonFiniteError


def gpus(number: int) -> AbstractContextManager[None]:
    return testing.fake_gpus(number) if number else nullcontext()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double()


def samples() -> TensorDataset:
    generator = torch.Generator(device="cpu").manual_seed(1)
    x = torch.randn(48, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (48,), generator=generator))


def host(module: nn.Module) -> list[torch.Tensor]:
    return [value.detach().cpu() for value in module.state_dict().values()]


def _trained(number: int, options: dict) -> tuple[str, list[torch.Tensor]]:
    with gpus(number), samestep.world(device=None if number else "cpu") as world:
        model = network().to(world.device)
        replica = samestep.replicate(model, world, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batches = samestep.shards(samples(), world, batch_size=8)
        for _ in range(2):
            for x, y in batches:
                assert x.device == y.device == world.device
                batches.mean(F.cross_entropy(replica(x), y, reduction="none")).backward()
                samestep.clip_grad_norm_(replica, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return f"{world.device} {world.backend}", host(model)


def test_training_with_prefetch_and_synchronised_statistics_is_that_of_cpus(two_ranks: Callable) -> None:
    on_gpus, on_cpus = two_ranks(_trained, 2, {}), two_ranks(_trained, 0, {})
    assert [place for place, _ in on_gpus] == ["cuda:0 nccl", "cuda:1 nccl"]
    for (_, one), (_, other) in zip(on_gpus, on_cpus, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_world_of_one_trains_on_the_first_gpu() -> None:
    (place, on_gpu), (_, on_cpu) = _trained(2, {}), _trained(0, {})
    assert place == "cuda:0 None"
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-9, atol=1e-12)


def _one_gpu() -> str:
    with testing.fake_gpus(1), pytest.raises(DeviceError) as raised, samestep.world():
        pass
    return str(raised.value)


def test_two_processes_on_one_gpu_are_refused(two_ranks: Callable) -> None:
    for text in two_ranks(_one_gpu):
        assert "rank" in text
        assert "GPU" in text


def _one_gpu_over_gloo() -> list[float]:
    with testing.fake_gpus(1), samestep.world(backend="gloo", device="cuda:0") as world:
        value = torch.full((2,), world.rank + 1.0, device=world.device)
        dist.all_reduce(value)
        return value.tolist()


def test_two_processes_share_one_gpu_over_gloo(two_ranks: Callable) -> None:
    assert two_ranks(_one_gpu_over_gloo) == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("policy", [None, "stop"])
def test_one_bad_element_of_a_gpu_s_gradients_is_found(policy: str | None) -> None:
    with testing.fake_gpus(1), samestep.world() as world:
        model = samestep.replicate(nn.Linear(400, 400).to(world.device), world, nonfinite=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 400, device=world.device)).sum().backward()
        optimizer.step()
        model.module.weight.grad[7, 9] = float("nan")
        with pytest.raises(NonFiniteError, match="the gradient of weight holds 1 NaN among 160,000 elements"):
            optimizer.step()


def test_a_device_that_is_not_there_is_refused() -> None:
    with testing.fake_gpus(2), pytest.raises(DeviceError), samestep.world(device="cuda:5"):
        pass


def _both_devices() -> list[float]:
    with testing.fake_gpus(2), samestep.world() as world:
        there, here = torch.ones(1, device=world.device), torch.ones(1, device="cpu")
        dist.all_reduce(there)
        dist.all_reduce(here)
        return [there.item(), here.item()]


def test_the_group_of_a_world_serves_both_devices(two_ranks: Callable) -> None:
    assert two_ranks(_both_devices) == [[2, 2], [2, 2]]


def _scaled() -> tuple[float, list[torch.Tensor]]:
    with testing.fake_gpus(2), samestep.world() as world:
        model = network().float().to(world.device)
        replica = samestep.replicate(model, world)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda", init_scale=2.0**8)
        batches = samestep.shards(samples(), world, batch_size=8)
        for x, y in batches:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = batches.mean(F.cross_entropy(replica(x.float()), y, reduction="none"))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            samestep.clip_grad_norm_(replica, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), host(model)


def test_float16_with_a_scaler_keeps_replicas_equal(two_ranks: Callable) -> None:
    (scale, first), (_, second) = two_ranks(_scaled)
    assert scale == 2.0**8
    testing.assert_same_bits(first, second)
    assert all(torch.isfinite(value).all() for value in first)


def _resumed(number: int, folder: str, stop_after: int) -> tuple[int, list[torch.Tensor], float]:
    with gpus(number), samestep.world(device=None if number else "cpu") as world:
        model = network().to(world.device)
        replica = samestep.replicate(model, world)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        batches = samestep.shards(samples(), world, batch_size=8)
        state = samestep.checkpoint(folder, world, every=1, model=replica, optimizer=optimizer, data=batches)
        began = state.step
        for _ in state.epochs(2):
            for x, y in batches:
                batches.mean(F.cross_entropy(replica(x), y, reduction="none")).backward()
                optimizer.step()
                optimizer.zero_grad()
                state.commit()
                if state.step == stop_after:
                    return began, host(model), 0.0
        return began, host(model), torch.rand(1, device=world.device).item()


@pytest.mark.prove
def test_a_checkpoint_goes_from_gpus_to_cpus_and_back(two_ranks: Callable, tmp_path: Path) -> None:
    whole = two_ranks(_resumed, 0, str(tmp_path / "whole"), 0)[0][1]
    for start, end in ((2, 0), (0, 2)):
        folder = str(tmp_path / f"{start}-{end}")
        two_ranks(_resumed, start, folder, 5)
        began, weights, _ = two_ranks(_resumed, end, folder, 0)[0]
        assert began == 5
        torch.testing.assert_close(weights, whole, rtol=1e-9, atol=1e-12)


def test_a_gpus_random_stream_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    _, _, drawn = _resumed(1, str(tmp_path / "whole"), 0)
    _resumed(1, str(tmp_path / "parts"), 5)
    assert _resumed(1, str(tmp_path / "parts"), 0)[2] == drawn


def test_an_evaluation_on_a_gpu_is_that_of_the_cpu() -> None:
    def evaluated(number: int) -> dict:
        with gpus(number), samestep.world(device=None if number else "cpu") as world:
            model = network().to(world.device).eval()
            accuracy = {"accuracy": lambda outputs, y: (outputs.argmax(1) == y).double().mean()}
            return samestep.evaluate(
                lambda batch: (model(batch[0]), batch[1]), samples(), world, batch_size=16, metrics=accuracy
            )

    assert evaluated(1) == evaluated(0)


def _gradients(number: int, devices: list[str], schedule: str) -> tuple[list[torch.Tensor], list[str]]:
    with gpus(number), samestep.world(device=devices[0]) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)).double()
        x, y = samples()[:12]
        plan = samestep.plan_pipeline(model, (x, y), F.cross_entropy, stages=2, repeats=1, schedule=schedule)
        stage = samestep.pipeline(model, world, plan, devices=devices, split_size=3)
        stage.step((x, y))
        parameters = list(stage.parameters())
        return [p.grad.cpu() for p in parameters], [str(p.device) for p in parameters]


@pytest.mark.parametrize("schedule", ["1f1b", "fill-drain"])
def test_a_pipeline_over_the_gpus_of_one_process_is_that_of_the_cpu(schedule: str) -> None:
    on_gpus, places = _gradients(2, ["cuda:0", "cuda:1"], schedule)
    on_cpus, _ = _gradients(0, ["cpu", "cpu"], schedule)
    assert set(places) == {"cuda:0", "cuda:1"}
    torch.testing.assert_close(on_gpus, on_cpus, rtol=1e-9, atol=1e-12)


def _staged(number: int) -> list[torch.Tensor]:
    """On so many GPUs; on one, both ranks share it."""
    place = {0: {"device": "cpu"}, 1: {"device": "cuda:0", "backend": "gloo"}, 2: {}}[number]
    with gpus(number), samestep.world(**place, pipeline=2) as world:
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 16), nn.ReLU()).double(), nn.Linear(16, 3).double()]
        stage = samestep.pipeline(parts, world, loss_fn=F.cross_entropy, micro_batches=4)
        x, y = samples()[:12]
        stage.step((x.to(world.device), y.to(world.device)))
        assert all(parameter.device == world.device for parameter in stage.parameters())
        return [parameter.grad.cpu() for parameter in stage.parameters()]


def test_a_pipeline_over_processes_with_a_gpu_each_is_that_of_cpus(two_ranks: Callable) -> None:
    on_cpus = two_ranks(_staged, 0)
    for number in (1, 2):
        torch.testing.assert_close(two_ranks(_staged, number), on_cpus, rtol=1e-9, atol=1e-12)


def _on_virtual_ranks(number: int) -> list[torch.Tensor]:
    place = {"device": "cuda:0", "backend": "gloo"} if number == 1 else {}
    with gpus(number), samestep.world(**place, virtual_ranks=4) as world:
        model = network().to(world.device)
        replica = samestep.replicate(model, world, batchnorm="local")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = samestep.shards(samples(), world, batch_size=8)
        for x, y in batches:
            batches.mean(F.cross_entropy(replica(x), y, reduction="none")).backward()
            if batches.step_ends:
                optimizer.step()
                optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("number", [1, 2])
def test_virtual_ranks_on_gpus_have_one_result(number: int, two_ranks: Callable) -> None:
    alone = _on_virtual_ranks(2)
    for rank in two_ranks(_on_virtual_ranks, number):
        torch.testing.assert_close(rank, alone, rtol=0, atol=0)


def _counted() -> tuple[int, str]:
    return torch.cuda.device_count(), str(torch.ones(1, device="cuda").device)


@pytest.mark.prove
def test_spawned_ranks_make_gpus_where_the_variable_asks_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMESTEP_FAKE_GPUS", "2")
    assert samestep.spawn(_counted, 2) == [(2, "cuda:0"), (2, "cuda:0")]


def test_a_plan_on_a_machine_with_several_gpus_warns_of_nothing() -> None:
    model, (x, y) = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3)).double(), samples()[:12]
    with testing.fake_gpus(2):
        torch.cuda.init()
        state = torch.cuda.get_rng_state()
        samestep.plan_pipeline(model, (x, y), F.cross_entropy, stages=2, repeats=1)  # warnings are errors
        assert torch.equal(state, torch.cuda.get_rng_state())


def _doctors_step(file: str) -> None:
    with testing.fake_gpus(2):
        step.main([file, "nccl"])


def test_the_doctors_trial_takes_its_step_over_nccl(two_ranks: Callable, tmp_path: Path) -> None:
    two_ranks(_doctors_step, str(tmp_path / "told"))
    told = json.loads((tmp_path / "told").read_text(encoding="utf-8"))
    assert (told["backend"], told["right"], told["ranks"], told["nccl"]) == ("nccl", True, 2, "2.27.3")


def test_the_doctors_trial_takes_its_step_on_the_only_gpu(tmp_path: Path) -> None:
    words = ["run", "--start", "fork", "-n", "1", "--fake-gpus", "1", "-m", trial.PROGRAM, "steps", "nccl"]
    subprocess.run([sys.executable, "-m", "samestep", *words], cwd=tmp_path, check=True, timeout=100)
    (taken,) = trial.read_steps(tmp_path / "steps")
    assert (taken["backend"], taken["right"], taken["ranks"]) == ("nccl", True, 1)


def test_the_imagenet_recipe_trains_on_the_gpu_that_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from samestep.recipes import imagenet

    seen = set()

    class Small(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 4, 5, stride=4), nn.Linear(4, classes)

        def forward(self, x):
            seen.add(str(x.device))
            return self.fc(self.conv(x).relu().mean(dim=(2, 3)))

    monkeypatch.setattr(imagenet, "architecture", lambda *_, classes, **__: Small(classes))
    monkeypatch.chdir(tmp_path)
    words = ["--dummy", "--dummy-images", "40", "--image-size", "32", "-b", "20", "-j", "0", "--epochs", "1"]
    with testing.fake_gpus(2):
        assert imagenet.main([*words, "--gpu", "1"]) in {0, None}
    assert seen == {"cuda:1"}
