import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, get_worker_info

import samestep
from deadline import in_time
from samestep.data.order import SampleOrder
from samestep.errors import DataError

DEADLINE_S = 3.0  # from a worker's death until its rank has said so
ORDER = SampleOrder(64, seed=0).take(0, 64).tolist()
VICTIM = ORDER[17]  # in the fifth micro-batch of 4: worker 0 of 2 is asked for it when the first is handed out


class Fatal(Dataset):
    """Loading one of its samples ends the process."""

    def __init__(self, end):
        self.end = end
        self.died = torch.zeros(2, dtype=torch.float64).share_memory_()

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == VICTIM:
            self.died[0] = time.monotonic()
            self.died[1] = os.getpid()
            self.end()
        return torch.tensor(index)


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def crashed():
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    ctypes.string_at(0)


def left():
    os._exit(0)


def left_with_a_code():
    os._exit(7)


def message_of(batches):
    """What iterating raises; the error itself would keep the other worker, by its traceback, until it is collected."""
    try:
        list(batches)
    except DataError as error:
        return str(error)


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (killed, "was killed by SIGKILL while .*; the kernel does that when memory runs out"),
        (crashed, "was killed by SIGSEGV while .*; native code of the dataset failed"),
        (left, "left with exit code 0 while "),
        (left_with_a_code, "left with exit code 7 while "),
    ],
    ids=["SIGKILL", "SIGSEGV", "exit 0", "exit 7"],
)
def test_a_worker_that_dies_is_named_with_what_it_was_loading(end, how):
    with samestep.world() as world:
        data = Fatal(end)
        said = message_of(samestep.shards(data, world, batch_size=4, workers=2))
        assert in_time(time.monotonic() - float(data.died[0]), DEADLINE_S)
        assert re.match(rf"worker 0 \(process \d+\) {how}", said)
        assert f"while it loaded sample {VICTIM} of micro-batch {ORDER[16:20]}" in said
        assert "\n" not in said


def test_a_worker_that_dies_interrupts_no_computation_of_the_rank():
    with samestep.world() as world:
        data = Fatal(killed)
        loop = iter(samestep.shards(data, world, batch_size=4, workers=2))
        next(loop)
        while not data.died[1] or is_alive(int(data.died[1])):
            torch.ones(1)
        assert message_of(loop).startswith("worker 0 ")


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def collate_and_die(samples):
    if VICTIM in torch.stack(samples):
        killed()
    return torch.stack(samples)


def test_a_worker_that_dies_while_it_makes_a_batch_is_named_with_the_samples():
    with samestep.world() as world:
        data = list(torch.arange(64))
        said = message_of(samestep.shards(data, world, batch_size=4, workers=1, collate_fn=collate_and_die))
    assert f"while it made a batch of samples {ORDER[16:20]}" in said


class KnowsItsWorker(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(get_worker_info().dataset is self)


def test_in_a_worker_torch_knows_the_users_dataset():
    with samestep.world() as world:
        assert all(bool(x.all()) for x in samestep.shards(KnowsItsWorker(), world, batch_size=2, workers=1))


class WithStuckSample:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 40:
            threading.Event().wait()
        return torch.tensor(index)


def leave_in_mid_epoch(dataset):
    """A script that ends while its workers still load; run as a process of its own."""
    world = samestep.world()
    batches = iter(samestep.shards(dataset, world, batch_size=4, workers=2, shuffle=False))
    leave_in_mid_epoch.kept = batches  # as a name at the top of a script would
    print(next(batches).tolist())


@pytest.mark.parametrize("dataset", ["range(64)", "WithStuckSample()"])
def test_a_script_that_ends_in_mid_epoch_ends_with_its_workers(dataset, tmp_path):
    folder = Path(__file__).parent
    found = f"import sys; sys.path += {[str(folder), str(folder.parent)]}"  # this file, and its own imports
    (tmp_path / "train.py").write_text(f"{found}\nfrom {__name__} import *\nleave_in_mid_epoch({dataset})\n")
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1, 2, 3]\n", "")
