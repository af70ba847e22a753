"""What a script sees under `samestep run`, and what is left of it afterwards."""

from __future__ import annotations

import json
import os

import pytest


def test_a_torchrun_style_script_runs_unchanged(folder):
    script = folder.script("""
        import torch, torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group()
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.full((1, 2), float(rank))).sum().backward()
        print("gradient", model.module.weight.grad[0, 0].item())
        dist.destroy_process_group()
    """)
    done = folder.run("-n", 2, script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] gradient 0.5", "[rank 1] gradient 0.5"]
    assert folder.result["failure"] is None
    assert folder.result["exit"] == 0


def test_every_rank_sees_the_variables_of_torchrun(folder):
    script = folder.script("""
        import json
        json.dump(dict(os.environ), open(f"environment{rank}", "w"))
    """)
    assert folder.run("-n", 2, "--start", "spawn", script, env={"OMP_NUM_THREADS": None}).returncode == 0
    first, second = (json.loads((folder.path / f"environment{rank}").read_text()) for rank in range(2))
    for environment, rank in ((first, "0"), (second, "1")):
        assert environment["RANK"] == environment["LOCAL_RANK"] == rank
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["GROUP_RANK"] == environment["TORCHELASTIC_RESTART_COUNT"] == "0"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
        assert environment["SAMESTEP_RUN_DIR"] == folder.result["run_dir"]
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["TORCHELASTIC_RUN_ID"] == second["TORCHELASTIC_RUN_ID"]


def test_the_users_own_thread_count_wins(folder):
    script = folder.script("print(os.environ['OMP_NUM_THREADS'])")
    done = folder.run("-n", 2, "--start", "spawn", script, env={"OMP_NUM_THREADS": "5"})
    assert sorted(done.stdout.splitlines()) == ["[rank 0] 5", "[rank 1] 5"]
    assert "OMP_NUM_THREADS=5 as you set it" in done.stderr


def test_arguments_after_the_script_are_the_scripts_own(folder):
    script = folder.script("print(sys.argv)")
    done = folder.run(script, "-n", 3, "--json", "x", "-m", "--", "a b")
    assert done.stdout == "['train.py', '-n', '3', '--json', 'x', '-m', '--', 'a b']\n"


def test_a_module_runs_as_python_m_runs_it(folder):
    folder.script("from package import NAME\nprint(NAME, __name__, sys.argv[1:], __spec__.name)", "package/train.py")
    (folder.path / "package/__init__.py").write_text("NAME = 'found'\n")
    done = folder.run("-m", "package.train", "--lr", "1")
    assert done.stdout == "found __main__ ['--lr', '1'] package.train\n"


def test_a_script_imports_its_neighbours_and_not_what_lies_in_the_current_directory(folder):
    folder.script("import neighbour\nprint(neighbour.__name__, __name__, __file__)", "inner/train.py")
    (folder.path / "inner/neighbour.py").write_text("")
    (folder.path / "json.py").write_text("raise RuntimeError('shadowed')")
    done = folder.run("inner/train.py")
    assert done.stdout == f"neighbour __main__ {folder.path}/inner/train.py\n", done.stderr


def test_the_local_rank_is_passed_in_either_spelling_when_asked_for(folder):
    script = folder.script("print(sys.argv[1:])")
    assert folder.run("--pass-local-rank", script, "x").stdout == "['--local-rank=0', 'x']\n"
    assert folder.run("--pass-local_rank", script, "x").stdout == "['--local_rank=0', 'x']\n"


def test_torchruns_spellings_are_accepted(folder):
    script = folder.script("print(size)")
    for spelling in ("--nproc_per_node=2", "--nproc-per-node=2"):
        done = folder.run("--standalone", spelling, script)
        assert sorted(done.stdout.splitlines()) == ["[rank 0] 2", "[rank 1] 2"], done.stderr


def test_no_rank_in_a_fresh_interpreter_imports_torch_before_the_script_does(folder):
    script = folder.script("""
        print("torch" in sys.modules)  # rank 0 serves the store all the same:
        join()
        meet()
    """)
    done = folder.run("-n", 2, "--start", "spawn", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[rank 0] False", "[rank 1] False"]


def test_exit_handlers_and_threads_end_as_under_python(folder):
    script = folder.script("""
        import atexit, pickle, threading
        class Late: pass
        start = threading.Event()
        def last():
            start.wait()
            print("thread", len(pickle.dumps(Late())) > 0)
        atexit.register(print, "handler")
        threading.Thread(target=last).start()
        print("script", end="\\n", flush=False)
        start.set()
    """)
    done = folder.run(script)
    assert sorted(done.stdout.split("\n")[:2]) == ["script", "thread True"]
    assert done.stdout.endswith("handler\n")
    assert done.returncode == 0


def test_the_run_directory_keeps_each_ranks_streams_and_a_record(folder):
    script = folder.script("print('out', rank); print('err', rank, file=sys.stderr)")
    assert folder.run("-n", 2, "--run-dir", "here", script, "--lr", "1").returncode == 0
    logs = {path.name: path.read_text() for path in folder.path.glob("here/0/*/*")}
    assert all(logs.pop(f"rank{rank}.events.jsonl").endswith("\n") for rank in (0, 1))
    assert logs == {"rank0.out": "out 0\n", "rank0.err": "err 0\n", "rank1.out": "out 1\n", "rank1.err": "err 1\n"}
    record = json.loads((folder.path / "here/run.json").read_text())
    assert (record["command"], record["ranks"], record["exit"]) == (["train.py", "--lr", "1"], 2, 0)
    assert record["ended"] >= record["began"]


def test_standard_input_reaches_a_single_rank(folder):
    folder.script("print(input())")
    with (folder.path / "typed").open("w+") as typed:
        typed.write("hello\n")
        typed.seek(0)
        assert folder.run("-n", 1, "train.py", stdin=typed).stdout == "hello\n"


def test_ranks_are_bound_to_cores_of_their_own_when_asked_for(folder):
    script = folder.script("print(*os.sched_getaffinity(0))")
    done = folder.run("-n", 2, "--pin", script)
    cores = [set(line.split("]")[1].split()) for line in done.stdout.splitlines()]
    assert not cores[0] & cores[1] or len(os.sched_getaffinity(0)) == 1
    assert "pinned" in done.stderr


def test_ranks_that_share_one_core_of_several_are_warned_of(folder):
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("this machine has one core")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})  # the launcher inherits it
    try:
        done = folder.run("-n", 2, folder.script(""))
    finally:
        os.sched_setaffinity(0, before)
    assert f"all 2 ranks of this host are bound to core {min(before)}, though" in done.stderr


def test_what_all_ranks_say_on_standard_error_is_shown_once_and_standard_output_rank_by_rank(folder):
    script = folder.script("""
        join()
        meet()
        print("out", flush=True)
        raise ValueError("alike")
    """)
    done = folder.run("-n", 3, script)
    lines = done.stderr.splitlines()
    assert [line for line in lines if line.endswith("] ValueError: alike")] == ["[3 ranks] ValueError: alike"]
    assert sorted(done.stdout.splitlines()) == [f"[rank {rank}] out" for rank in range(3)]
    assert "samestep: error: all 3 ranks failed: ValueError: alike" in lines


def test_ranks_in_different_collectives_are_told_as_that_though_one_was_aborted(folder):
    """gloo aborts the rank that gets a message of another size; the one that left a collective out goes on."""
    script = folder.script("""
        join()
        import torch, torch.distributed as dist
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        dist.all_reduce(torch.ones(50_000))
        dist.all_reduce(torch.ones(1))
        time.sleep(600)
    """)
    done = folder.run("-n", 2, script)
    assert done.returncode == 134
    (line,) = [line for line in done.stderr.splitlines() if "samestep: error:" in line]
    assert "the ranks were in unlike collectives" in line
    assert "`samestep verify` says what each had called" in line
    assert "unlike collectives" in folder.result["failure"]["message"]


@pytest.mark.parametrize("option", [("-n", 2), ("--nproc-per-node=2",)])
def test_a_number_of_processes_behind_the_script_is_explained(folder, option):
    script = folder.script("""
        import argparse
        argparse.ArgumentParser().parse_args()
    """)
    done = folder.run(script, *option)
    assert done.returncode == 2
    words = " ".join(map(str, option))
    (last, logs) = done.stderr.splitlines()[-2:]
    said = f"{script} does not take {words}, and options of samestep run stand before the script"
    assert last == f"samestep: error: {said}: samestep run {words} {script}"
    assert logs.startswith("    logs: ")
    assert "rank 0" not in done.stderr
