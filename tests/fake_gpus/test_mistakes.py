"""Mistakes that people make when they move a script to GPUs: they raise at the line where a GPU would."""

from __future__ import annotations

import io
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from samestep import testing


@pytest.fixture(autouse=True)
def _gpus() -> Iterator[None]:
    with testing.fake_gpus(2):
        yield


def batch_left_on_the_cpu():
    model = nn.Linear(2, 2).cuda()
    model(torch.ones(1, 2))  # here


def model_left_on_the_cpu():
    nn.Linear(2, 2)(torch.ones(1, 2, device="cuda"))  # here


def targets_left_on_the_cpu():
    F.cross_entropy(torch.ones(2, 3, device="cuda"), torch.tensor([0, 1]))  # here


def tensors_of_two_gpus():
    torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")  # here


def second_half_of_the_model_elsewhere():
    first, second = nn.Linear(2, 2).to("cuda:0"), nn.Linear(2, 2).to("cuda:1")
    second(first(torch.ones(1, 2, device="cuda:0")))  # here


def numpy_without_cpu():
    torch.ones(2, device="cuda").numpy()  # here


def numpy_function_without_cpu():
    np.mean(torch.ones(2, device="cuda"))  # here


def gpu_that_is_not_there():
    torch.ones(2, device="cuda:2")  # here


def set_device_beyond_the_last():
    torch.cuda.set_device(2)  # here


def map_location_forgotten():
    file = io.BytesIO()
    torch.save(torch.ones(1, device="cuda:1"), file)
    file.seek(0)
    with pytest.MonkeyPatch.context() as patch, _one_visible(patch):
        torch.load(file)  # here


def buffer_that_is_not_registered():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.ones(2)  # neither a parameter nor a buffer

        def forward(self, x):
            return x * self.scale  # here

    Model().cuda()(torch.ones(1, 2, device="cuda"))


def made_on_the_cpu_in_forward():
    class Model(nn.Module):
        def forward(self, x):
            return torch.cat([x, torch.zeros(1, 2)])  # here

    Model().cuda()(torch.ones(1, 2, device="cuda"))


def cpu_tensor_indexed_from_a_gpu():
    torch.ones(3)[torch.tensor([0], device="cuda")]  # here


def optimizer_state_of_another_device():
    weight = torch.ones(2, device="cuda", requires_grad=True)
    weight.sum().backward()
    optimizer = torch.optim.SGD([weight], 0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = torch.zeros(2)
    optimizer.step()  # here


def gradient_on_the_cpu():
    weight = torch.ones(2, device="cuda", requires_grad=True)
    weight.grad = torch.ones(2)  # here


def mask_on_the_cpu():
    torch.ones(2, device="cuda").masked_fill(torch.tensor([True, False]), 0.0)  # here


def pinning_a_tensor_of_a_gpu():
    torch.ones(2, device="cuda").pin_memory()  # here


def generator_of_the_cpu():
    torch.randperm(4, device="cuda", generator=torch.Generator())  # here


def embedding_of_indices_on_the_cpu():
    nn.Embedding(3, 2).cuda()(torch.tensor([1]))  # here


def times_of_an_event_that_was_not_recorded():
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.elapsed_time(second)  # here


def _one_visible(patch: pytest.MonkeyPatch):
    """One GPU is visible from here on, as on the machine that loads what another has saved."""
    from samestep.fake_gpus import devices

    patch.setattr(devices.DEVICES, "seen", (0,))
    return pytest.MonkeyPatch.context()


MISTAKES: list[tuple[Callable[[], object], type[Exception], str]] = [
    (batch_left_on_the_cpu, RuntimeError, "Expected all tensors to be on the same device"),
    (model_left_on_the_cpu, RuntimeError, "Expected all tensors to be on the same device"),
    (
        targets_left_on_the_cpu,
        RuntimeError,
        "at least two devices, cuda:0 and cpu|got target is on cpu, different from other tensors on cuda:0",
    ),
    (tensors_of_two_gpus, RuntimeError, "at least two devices, cuda:0 and cuda:1"),
    (second_half_of_the_model_elsewhere, RuntimeError, "Expected all tensors to be on the same device"),
    (numpy_without_cpu, TypeError, "can't convert cuda:0 device type tensor to numpy"),
    (numpy_function_without_cpu, TypeError, "can't convert cuda:0 device type tensor to numpy|mean"),
    (gpu_that_is_not_there, RuntimeError, "CUDA error: invalid device ordinal"),
    (set_device_beyond_the_last, RuntimeError, "CUDA error: invalid device ordinal"),
    (map_location_forgotten, RuntimeError, "Attempting to deserialize object on CUDA device 1"),
    (buffer_that_is_not_registered, RuntimeError, "at least two devices, cuda:0 and cpu"),
    (made_on_the_cpu_in_forward, RuntimeError, "Expected all tensors to be on the same device"),
    (cpu_tensor_indexed_from_a_gpu, RuntimeError, "indices should be either on cpu or on the same device"),
    (optimizer_state_of_another_device, RuntimeError, "Expected all tensors to be on the same device"),
    (
        gradient_on_the_cpu,
        RuntimeError,
        "device type .cpu. to a tensor with device type .cuda.|located on a different device",
    ),
    (
        mask_on_the_cpu,
        RuntimeError,
        "Expected all tensors to be on the same device|at least two devices|got mask on cpu and self on cuda:0",
    ),
    (pinning_a_tensor_of_a_gpu, RuntimeError, "cannot pin"),
    (generator_of_the_cpu, RuntimeError, "Expected a 'cuda' device type for generator but found 'cpu'"),
    (embedding_of_indices_on_the_cpu, RuntimeError, "Expected all tensors to be on the same device"),
    (times_of_an_event_that_was_not_recorded, ValueError, "must be recorded"),
]


@pytest.mark.parametrize(("mistake", "kind", "text"), MISTAKES, ids=[mistake.__name__ for mistake, *_ in MISTAKES])
def test_a_mistake_raises_at_its_line(mistake: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text) as raised:
        mistake()
    lines = [
        frame for frame in traceback.extract_tb(raised.value.__traceback__) if Path(frame.filename) == Path(__file__)
    ]
    assert lines[-1].line is not None
    assert lines[-1].line.endswith("# here")


def test_what_follows_a_mistake_works() -> None:
    with pytest.raises(RuntimeError):
        batch_left_on_the_cpu()
    assert nn.Linear(2, 2).cuda()(torch.ones(1, 2, device="cuda")).is_cuda


def test_there_are_no_gpus_once_they_are_removed() -> None:
    assert torch.cuda.is_available()
    with pytest.raises(ValueError, match="2 fake GPUs in this process already"), testing.fake_gpus(1):
        pass
