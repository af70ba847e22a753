import pytest
import torch

from samestep.errors import DeviceError
from samestep.runtime.device import check_no_shared_gpu, choose_device, default_device


#   local rank of size, GPUs seen, device
@pytest.mark.parametrize(
    ("local_rank", "local_size", "visible", "device"),
    [
        (0, 1, 0, "cpu"),
        (3, 4, 0, "cpu"),
        (0, 1, 1, "cuda:0"),
        (3, 4, 1, "cuda:0"),  # Slurm's --gpus-per-task shows each rank its own card as number 0
        (3, 4, 4, "cuda:3"),
        (1, 2, 8, "cuda:1"),
    ],
)
def test_the_device_follows_from_local_rank_and_sight(local_rank, local_size, visible, device):
    assert default_device(local_rank, local_size, visible=visible) == torch.device(device)


def test_more_ranks_than_gpus_is_refused_with_the_number_that_fits():
    with pytest.raises(DeviceError, match=r"4 ranks on this host see 2 GPUs.*samestep run -n 2"):
        default_device(0, 4, visible=2)


def test_the_device_asked_for_wins():
    assert choose_device(torch.device("cpu"), 0, 1) == torch.device("cpu")
    assert choose_device(torch.device("meta"), 0, 1) == torch.device("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_a_gpu_that_nobody_sees_is_refused(name):
    with pytest.raises(DeviceError, match=f"device '{name}' was asked for, but this process sees 0 GPUs"):
        choose_device(torch.device(name), 0, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_without_a_number_means_the_ranks_own():
    assert choose_device(torch.device("cuda"), 0, 1) == torch.device("cuda", 0)


def test_two_ranks_on_one_card_are_refused_with_the_reason():
    with pytest.raises(DeviceError, match="ranks 0 and 2 hold the same GPU.*deadlocks"):
        check_no_shared_gpu([(0, "a", "GPU-1"), (1, "b", "GPU-1"), (2, "a", "GPU-1")])


def test_ranks_on_cpus_or_cards_of_their_own_share_nothing():
    check_no_shared_gpu([(0, "a", None), (1, "a", None), (2, "a", "GPU-1"), (3, "a", "GPU-2"), (4, "b", "GPU-1")])
