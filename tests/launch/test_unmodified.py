"""Programs written for other launchers, or none, run unchanged."""

from __future__ import annotations

import pytest

from ports import free_port

TUTORIAL = """
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    value = torch.ones(1)
    dist.all_reduce(value)
    sys.stdout.write(f"rank {{rank}} sum {{value.item()}}\\n")
    sys.stdout.flush()
    {fault}
    dist.destroy_process_group()
"""


SPAWNED_FAULTS = {
    "raised": ("raise KeyError('label')", 1, "KeyError", "'label' (in its own rank 1, process {})", True),
    "segfault": ("os.kill(os.getpid(), 11)", 139, "Signal", "it was killed by SIGSEGV (signal 11; in its own", True),
    "killed": ("os.kill(os.getpid(), 9)", 137, "Signal", "it was killed by SIGKILL (signal 9; in its own", False),
    "left": ("os._exit(3)", 3, "Exit", "it exited with code 3 without a Python exception (in its own", False),
}


@pytest.mark.parametrize(
    ("fault", "method"),
    [pytest.param("raised", "spawn", marks=pytest.mark.prove), *((fault, "fork") for fault in SPAWNED_FAULTS)],
)
def test_the_rank_that_failed_among_those_a_script_spawned_is_named(folder, fault, method):
    """The script numbers its ranks the other way round than torch.multiprocessing its processes."""
    statement, code, exception, message, shows_line = SPAWNED_FAULTS[fault]
    text = TUTORIAL.format(port=free_port(), fault=f"if rank == 1: {statement}")
    turned = "def turned(index, size):\n    print(os.getpid(), flush=True) if index == 0 else None\n"
    turned += "    work(size - 1 - index, size)\n    time.sleep(60)\n"  # the others are ended by torch
    begin = f"mp.start_processes(turned, (2,), nprocs=2, start_method={method!r})"
    script = folder.script(f"{text}\n{turned}\nif __name__ == '__main__':\n    {begin}")
    done = folder.run("--start", "fork", script)
    failure = folder.result["failure"]
    assert (done.returncode, failure["exception"]) == (code, exception), done.stderr
    process = next(line for line in done.stdout.splitlines() if line.isdigit())
    assert failure["message"].startswith(message.format(process))
    assert f"in its own rank 1, process {process})" in failure["message"]
    assert (statement in done.stderr.splitlines()[-3]) == shows_line


def test_a_process_that_fails_before_it_joins_has_the_number_that_torch_gave_it(folder):
    text = """
        def work(index):
            if index == 1: raise KeyError("early")
        if __name__ == "__main__":
            import torch.multiprocessing as mp
            mp.start_processes(work, nprocs=2, start_method="fork")
    """
    folder.run("--start", "fork", folder.script(text))
    assert folder.result["failure"]["message"] == "'early' (in process 1 of those it spawned)"


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.prove)])
def test_a_script_that_sets_an_address_of_its_own(folder, start):
    script = folder.script(TUTORIAL.format(port=free_port(), fault="pass") + "\nwork(rank, size)")
    done = folder.run("-n", 2, "--start", start, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] rank 0 sum 2.0", "[rank 1] rank 1 sum 2.0"]


def test_a_script_that_sets_its_threads_before_it_imports_torch(folder):
    script = folder.script("os.environ['OMP_NUM_THREADS'] = '2'\nprint('torch' in sys.modules)\n# import torch")
    done = folder.run("-n", 2, script)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] False", "[rank 1] False"]
    assert "starts in fresh interpreters: it sets OMP_NUM_THREADS in line" in done.stderr


def test_a_module_of_the_scripts_own_is_not_taken_for_an_installed_one(folder):
    (folder.path / "timeit.py").write_text("HERE = True\n")  # torch imports python's own
    done = folder.run("-n", 2, folder.script("import timeit\nprint(timeit.HERE)"))
    assert sorted(done.stdout.splitlines()) == ["[rank 0] True", "[rank 1] True"], done.stderr
    assert "timeit.py lies beside it" in done.stderr


def test_forked_ranks_do_not_draw_the_same_numbers(folder):
    script = folder.script("""
        import random, numpy, torch
        print(rank, random.random(), numpy.random.rand(), torch.initial_seed())
    """)
    done = folder.run("-n", 2, "--start", "fork", script)
    (_, _, _, *first), (_, _, _, *second) = (line.split() for line in sorted(done.stdout.splitlines()))
    assert len(first) == 3
    assert not set(first) & set(second)


def test_forked_ranks_have_the_streams_that_python_gives(folder):
    script = folder.script("""
        import signal
        print(sys.stdin.read() == "", sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.encoding,
              signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGTERM),
              sorted(set(os.listdir("/proc/self/fd")) - {"0", "1", "2"}, key=int)[:1], os.getpgid(0) == os.getpid())
    """)
    forked, fresh = (
        sorted(folder.run("-n", 2, "--start", start, script).stdout.splitlines()) for start in ("fork", "spawn")
    )
    without_descriptors = [line.split("[")[1] for line in forked]
    assert without_descriptors == [line.split("[")[1] for line in fresh]


def test_accelerate(folder):
    pytest.importorskip("accelerate")
    script = folder.script("""
        import torch
        from accelerate import Accelerator
        from torch.utils.data import DataLoader, TensorDataset
        accelerator = Accelerator(cpu=True)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(16, 3), torch.randn(16, 1)), batch_size=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for x, y in loader:
            accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        print(accelerator.num_processes, accelerator.reduce(torch.tensor(1.0), "sum").item())
        accelerator.end_training()
    """)
    done = folder.run("-n", 2, script)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 2 2.0", "[rank 1] 2 2.0"], done.stderr


def test_lightning_fabric(folder):
    pytest.importorskip("lightning_fabric")
    script = folder.script("""
        import torch
        from lightning_fabric import Fabric
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
        fabric.launch()
        model = torch.nn.Linear(3, 1)
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fabric.backward(model(torch.ones(2, 3)).sum())
        optimizer.step()
        print(fabric.world_size, fabric.all_reduce(torch.tensor(1.0), reduce_op="sum").item())
    """)
    done = folder.run("-n", 2, script)
    assert {"[rank 0] 2 2.0", "[rank 1] 2 2.0"} <= set(done.stdout.splitlines()), done.stderr
