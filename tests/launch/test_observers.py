"""What watches a rank from inside: in ranks that are forked, fresh, or spawned by the script itself."""

from __future__ import annotations

import json
import sys

import pytest

from samestep import progress
from samestep.launch.rank.import_hooks import when_imported

WATCH = """
import json, os, sys
from dataclasses import asdict
from samestep import progress
from samestep.launch.rank.observers import Observer

class Watch(Observer):
    def begin(self, seat):
        self.seat = seat
        self.early = "torch" in sys.modules
        seat.folder.mkdir(parents=True, exist_ok=True)

    def end(self, error):
        read = progress._listeners[0]
        told = {"rank": self.seat.rank, "size": self.seat.size, "spawned": self.seat.spawned, "process": os.getpid()}
        told |= {"steps": progress.finished_steps(), "collectives": read.fields.entered}
        told |= {"torch": self.early, "error": repr(error)}
        (self.seat.folder / f"rank{self.seat.rank}.watch").write_text(json.dumps(told))
"""

LAUNCH = """
import os, sys
sys.path.append(os.getcwd())  # where forked ranks find the observer
from samestep.cli import main
sys.exit(main())
"""

TRAINING = """
    join()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    meet()
    dist.all_gather_object([None] * size, rank)
"""


@pytest.fixture
def watched(folder):
    """Runs a script with an observer, and returns what that wrote down, by rank."""
    (folder.path / "watch.py").write_text(WATCH)
    (folder.path / "launch.py").write_text(LAUNCH)

    def run(*arguments, start="fork"):
        environment = {"SAMESTEP_OBSERVERS": "watch:Watch"}
        if start == "spawn":
            done = folder.run("--start", start, *arguments, env=environment | {"PYTHONPATH": str(folder.path)})
        else:
            done = folder.run("--start", start, *arguments, env=environment, program=["launch.py"])
        files = sorted(folder.path.glob("runs/*/0/**/*.watch"))
        return done, [json.loads(file.read_text()) for file in files]

    return run


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.prove)])
def test_an_unchanged_script_is_watched_from_its_first_line_to_its_last(folder, watched, start):
    ranks = 2 if start == "fork" else 1
    done, told = watched("-n", ranks, folder.script(TRAINING), start=start)
    assert done.returncode == 0, done.stderr
    assert [(one["rank"], one["size"], one["spawned"]) for one in told] == [
        (rank, ranks, False) for rank in range(ranks)
    ]
    assert [(one["steps"], one["collectives"]) for one in told] == [
        (3, 3)
    ] * ranks  # init, all_reduce, all_gather_object
    assert [one["torch"] for one in told] == [start == "fork"] * ranks  # a fresh interpreter need not have imported it
    assert {one["error"] for one in told} == {"None"}


def test_what_a_script_leaves_uncaught_is_told(folder, watched):
    done, told = watched("-n", 1, folder.script("raise KeyError('x')"))
    assert done.returncode == 1
    assert [one["error"] for one in told] == ["KeyError('x')"]


def test_an_observer_that_is_not_there_fails_the_run_by_name(folder):
    done = folder.run("-n", 1, folder.script("pass"), env={"SAMESTEP_OBSERVERS": "nowhere:Watch"})
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'nowhere'" in done.stderr


@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(one, marks=pytest.mark.prove) for one in ("spawn", "forkserver"))]
)
def test_ranks_that_a_script_spawns_are_watched_from_when_they_join(folder, watched, method):
    script = folder.script(f"""
        import tempfile, torch, torch.distributed as dist, torch.multiprocessing as mp
        def work(number, path):
            dist.init_process_group("gloo", init_method="file://" + path, rank=number, world_size=2)
            dist.barrier()
            dist.barrier()
            dist.destroy_process_group()
        if __name__ == "__main__":
            context = mp.get_context("{method}")
            path = tempfile.mktemp()
            workers = [context.Process(target=work, args=(number, path)) for number in range(2)]
            [worker.start() for worker in workers]
            [worker.join() for worker in workers]
            print([worker.exitcode for worker in workers])
    """)
    done, told = watched("-n", 1, script)
    assert "[0, 0]" in done.stdout, done.stderr
    own, *theirs = sorted(told, key=lambda one: one["spawned"])
    assert (own["rank"], own["size"], own["collectives"]) == (0, 1, 0)
    assert [(one["rank"], one["size"], one["spawned"]) for one in theirs] == [(0, 2, True), (1, 2, True)]
    assert [one["collectives"] for one in theirs] == [2, 2]  # what came before they were known is not noted
    records = sorted(folder.path.glob("runs/*/0/*/rank0.spawned/*.progress"))
    assert [progress.read_file(record).process for record in records] == [one["process"] for one in theirs]


def test_workers_of_a_data_loader_do_not_write_into_the_record_of_their_rank(folder, watched):
    script = folder.script("""
        import torch
        from samestep import progress
        class Data(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index):
                progress.set_step(1000)
                return index
        progress.set_step(1)
        if __name__ == "__main__":
            print(sum(len(batch) for batch in torch.utils.data.DataLoader(Data(), 2, num_workers=2)))
    """)
    done, told = watched("-n", 1, script)
    assert (done.returncode, done.stdout) == (0, "8\n")
    assert [one["steps"] for one in told] == [1]


def test_exchanges_between_two_ranks_and_compiled_collectives_work_as_without(folder):
    script = folder.script("""
        join()
        value, other = torch.full((1,), float(rank)), torch.zeros(1)
        both = [dist.P2POp(dist.isend, value, 1 - rank), dist.P2POp(dist.irecv, other, 1 - rank)]
        for work in dist.batch_isend_irecv(both):
            work.wait()
        def doubled(x):
            y = x * 2
            dist.all_reduce(y)
            return y
        print(other.item(), torch.compile(doubled, backend="eager", fullgraph=True)(torch.ones(1)).item())
    """)
    done = folder.run("-n", 2, script)
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 1.0 4.0", "[rank 1] 0.0 4.0"], done.stderr


def test_where_a_rank_was_killed_is_known_from_its_record(folder):
    script = folder.script("""
        import threading
        from samestep import progress
        def kill_in_barrier():
            record = progress._listeners[0].fields
            while record.operation != b"barrier":
                pass
            os.kill(os.getpid(), 9)
        join()
        meet()
        if rank == 1:
            threading.Thread(target=kill_in_barrier).start()
            dist.barrier()
        else:
            dist.recv(torch.ones(1), 1)
    """)
    done = folder.run("-n", 2, script)
    failure = folder.result["failure"]
    assert (failure["rank"], failure["signal"]) == (1, 9)
    assert "dist.barrier()" in done.stderr.splitlines()[-4]


@pytest.mark.parametrize("known", [False, True])
def test_a_module_is_changed_once_it_has_been_imported(tmp_path, monkeypatch, known):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_one.py").write_text("value = 1\n")
    monkeypatch.delitem(sys.modules, "late_one", raising=False)
    if known:
        import late_one
    when_imported("late_one", lambda module: setattr(module, "value", module.value + 1))
    import late_one

    assert late_one.value == 2
    assert late_one.__spec__.loader is late_one.__loader__
    assert late_one.__loader__.get_source("late_one") == "value = 1\n"
    monkeypatch.delitem(sys.modules, "late_one")


def test_a_module_that_is_not_there_stays_missing(monkeypatch):
    when_imported("no_such_module_at_all", print)
    with pytest.raises(ModuleNotFoundError):
        __import__("no_such_module_at_all")
    assert sys.meta_path.pop(0)._name == "no_such_module_at_all"
