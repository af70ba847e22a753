"""How a run ends, or goes on: nobody is hurried without need, and nobody is waited for in vain."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_supervise import is_running, wait_until_gone

from samestep.launch.process import children

READY = """
def ready():
    with open(f"ready{rank}.tmp", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"ready{rank}.tmp", f"ready{rank}")  # seen, it is whole
"""


def wait_for(folder, *names, seconds=60):
    until = time.monotonic() + seconds
    while not all((folder.path / name).exists() for name in names):
        assert time.monotonic() < until, f"none of {names} came"
        time.sleep(0.01)


def ended(process, seconds=60):
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


# --- time to end in one's own way ---------------------------------------------------------------


@pytest.mark.parametrize("repeated", [False, True])
def test_ranks_that_end_in_their_own_way_after_sigterm_are_not_cut_off_by_the_first_that_has(folder, repeated):
    script = folder.script(f"""
        {READY.strip().replace(chr(10), chr(10) + "        ")}
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        ready()
        try:
            time.sleep(60)
        finally:
            open(f"leaving{{rank}}", "w").close()
            if rank == 0:
                time.sleep(1.5)
                open("saved", "w").close()
    """)
    process = folder.start("-n", 2, script)
    wait_for(folder, "ready0", "ready1")
    process.terminate()
    wait_for(folder, "leaving0", "leaving1")
    if repeated:
        process.terminate()
    code, _, err = ended(process)
    assert (folder.path / "saved").exists()
    assert (code, "interrupted by SIGTERM" in err) == (143, True)


def test_the_rank_that_fails_runs_its_exit_handlers_to_their_end(folder):
    script = folder.script("""
        import atexit
        atexit.register(lambda: (time.sleep(1.5), open("handled", "w").close()))
        join()
        meet()
        if rank == 1:
            raise KeyError("label")
        time.sleep(60)
    """)
    done = folder.run("-n", 2, script)
    assert (folder.path / "handled").exists()
    assert (done.returncode, folder.result["failure"]["rank"]) == (1, 1)


def test_a_save_that_outlasts_the_grace_is_told(folder):
    script = folder.script("""
        import samestep, torch
        with samestep.world() as world:
            batches = samestep.shards(list(range(8)), world, batch_size=2)
            state = samestep.checkpoint("kept", world, every=100, data=batches)
            for batch in batches:
                open("ready0", "w").close()
                time.sleep(60)
    """)
    process = folder.start("-n", 1, "--start", "fork", "--grace", 1, script)
    wait_for(folder, "ready0")
    process.terminate()
    code, _, err = ended(process)
    assert code == 143
    assert "the step at hand was not saved within 1 s: give it more with --grace" in err


# --- signals that end nothing -----------------------------------------------------------------


@pytest.mark.parametrize("handles", [True, False])
def test_sigusr1_is_for_scripts_that_handle_it_and_ends_no_other(folder, handles):
    """Slurm sends it early when it was asked to; a script that cannot save keeps the rest of its time."""
    handler = "signal.signal(signal.SIGUSR1, lambda *_: open(f'heard{rank}', 'a').close())" if handles else "pass"
    script = folder.script(
        f"{READY}\n{handler}\nready()\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        "if rank == 1: raise KeyError('later')\njoin()"
    )
    process = folder.start("-n", 2, script)
    wait_for(folder, "ready0", "ready1")
    for _ in range(2):
        process.send_signal(signal.SIGUSR1)
        if handles:
            wait_for(folder, "heard0", "heard1")
    (folder.path / "go").touch()
    code, _, err = ended(process)
    assert code == 1
    assert "samestep: error: rank 1 of 2 failed: KeyError: 'later'" in err


def test_nohup_is_honoured(folder):
    script = folder.script(f"{READY}\nready()\nwhile not os.path.exists('go'): time.sleep(0.01)")
    ignored = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    process = folder.start("-n", 2, "--start", "spawn", script, **ignored)
    wait_for(folder, "ready0", "ready1")
    process.send_signal(signal.SIGHUP)
    (folder.path / "go").touch()
    assert ended(process)[0] == 0


@pytest.mark.fresh_interpreter
def test_a_signal_while_torch_is_imported_ends_all_at_once(folder):
    process = folder.start("-n", 2, folder.script("time.sleep(60)"))
    until = time.monotonic() + 30
    while not children(process.pid):
        assert time.monotonic() < until
    agent = children(process.pid)[0]
    while not Path(f"/proc/{agent}/maps").read_text().count("libtorch"):  # it is in the middle of it
        assert time.monotonic() < until
    while not int(status(process.pid)["SigCgt"], 16) >> signal.SIGTERM - 1 & 1:  # the head reads its own modules
        assert time.monotonic() < until
    process.terminate()
    code, _, err = ended(process)
    assert (code, "interrupted by SIGTERM" in err) == (143, True)
    assert not is_running(agent)


def status(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# --- readers ------------------------------------------------------------------------------------


def test_a_failure_is_noticed_though_nobody_reads_the_output(folder):
    script = folder.script(f"""
        {READY.strip().replace(chr(10), chr(10) + "        ")}
        join()
        print(("y" * 99 + "\\n") * 10_000, flush=True)
        ready()
        meet()
        if rank == 1:
            raise KeyError("label")
        time.sleep(600)
    """)
    process = folder.start("-n", 2, script)
    wait_for(folder, "ready0", "ready1")
    ranks = [int((folder.path / f"ready{rank}").read_text()) for rank in range(2)]
    wait_until_gone(ranks)
    code, out, err = ended(process)
    assert code == 1
    assert out.count("y" * 99) == 20_000
    assert "rank 1 of 2 failed: KeyError: 'label'" in err


def test_a_signal_is_obeyed_though_nobody_reads_the_output(folder):
    script = folder.script(f"{READY}\nready()\nfor _ in range(3000): print('y' * 9999)")
    process = folder.start("-n", 2, script)
    wait_for(folder, "ready0", "ready1")
    log = next(iter(folder.path.glob("runs/*/0/*/rank0.out")))
    sizes = [-1]
    while len(set(sizes[-4:])) > 1 or len(sizes) < 4:  # the ranks wait for the reader
        time.sleep(0.5)
        sizes.append(log.stat().st_size)
    size = sizes[-1]
    ranks = [int((folder.path / f"ready{rank}").read_text()) for rank in range(2)]
    process.terminate()
    wait_until_gone(ranks)
    code, out, _ = ended(process)
    assert code == 143
    assert "bytes are not shown here: see the logs" in out or len(out) <= size * 2


def test_a_reader_that_leaves_takes_neither_exit_code_nor_record(folder):
    script = folder.script("print('one', file=sys.stderr)\nsys.exit(7)")
    process = folder.start("--json", folder.json, "--restarts", 1, "-n", 2, script)
    assert process.stderr.readline()
    process.stderr.close()
    process.stdout.close()
    assert process.wait(60) == 7
    assert folder.result["exit"] == 7


def test_many_equal_lines_do_not_hold_up_the_run(folder):
    script = folder.script("os.write(2, b'\\n' * 50_000 if rank == 1 else b'')\nprint('end')")
    done = folder.run("-n", 2, script)
    assert done.returncode == 0
    assert done.stdout.count("end") == 2
    assert done.stderr.count("[rank 1] \n") == 50_000


def test_what_a_rank_has_left_writing_does_not_hold_up_the_end(folder):
    script = folder.script("import subprocess\nif rank == 1: subprocess.Popen(['yes', 'y' * 500])")
    process = folder.start("-n", 2, script, stdout=subprocess.DEVNULL)
    assert ended(process)[0] == 0


def test_a_terminal_that_changes_its_size_after_rank_0_has_ended(folder):
    script = folder.script(f"{READY}\nready()\nif rank == 1:\n    while not os.path.exists('go'): time.sleep(0.01)")
    ours, theirs = pty.openpty()
    process = folder.start("-n", 2, script, stdout=theirs, stderr=theirs, stdin=theirs, start_new_session=True)
    os.close(theirs)
    wait_for(folder, "ready0", "ready1")
    wait_until_gone([int((folder.path / "ready0").read_text())])
    process.send_signal(signal.SIGWINCH)
    (folder.path / "go").touch()
    shown = b""
    while select.select([ours], [], [], 30)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # its other side is closed
            break
    os.close(ours)
    assert process.wait(30) == 0, shown.decode()


# --- files --------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")
def test_a_full_disk_ends_the_logs_and_not_the_training(folder):
    disk = folder.path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], check=False)
    if mounted.returncode:
        pytest.skip("this user may not mount a file system")
    try:
        script = folder.script("print('y' * 999_999)\nprint('y' * 999_999)\nprint('end')")
        done = folder.run("-n", 2, "--run-dir", disk / "run", script)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("end") == 2
    assert "output is not kept any more: No space left on device" in done.stderr


def test_a_script_that_clears_the_run_directory_away_is_blamed_for_what_it_did_wrong(folder):
    script = folder.script("import shutil\nshutil.rmtree('runs')\nraise KeyError('label')")
    done = folder.run("-n", 1, script)
    assert done.returncode == 1
    assert "failed: KeyError: 'label'" in done.stderr


def test_orphans_of_a_rank_are_reaped_while_it_runs(folder):
    script = folder.script("""
        from samestep.launch.process import children
        for _ in range(20):
            os.system("true &")
        until = time.monotonic() + 30
        def dead(process):
            try:
                return open(f"/proc/{process}/stat").read().rpartition(")")[2].split()[0] == "Z"
            except (FileNotFoundError, ProcessLookupError):  # reaped between two looks
                return False
        while (left := [child for child in children(os.getppid()) if dead(child)]) and time.monotonic() < until:
            time.sleep(0.1)
        print(len(left))
    """)
    assert folder.run("-n", 1, script).stdout == "0\n"


# --- models that outlive their process group ------------------------------------------------------


def test_a_model_that_goes_after_its_process_group_does_not_hold_up_its_rank(folder):
    """And its group goes with it, or soon after: each has a thread that wakes 100 times a second."""
    script = folder.script("""
        import gc, pathlib, torch, torch.distributed as dist

        def train(turn):
            dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/meet{turn}", rank=rank, world_size=2)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
            for _ in range(3):
                model(torch.ones(4, 300)).sum().backward()
            dist.all_gather([torch.empty(1000) for _ in range(2)], torch.ones(1000))
            dist.destroy_process_group()

        for turn in range(8):
            train(turn)
            gc.collect()
        threads = [each.read_text().strip() for each in pathlib.Path("/proc/self/task").glob("*/comm")]
        assert threads.count("gloo_tcp_loop") <= 2, threads
    """)
    process = folder.start("-n", 2, script)
    assert ended(process)[0] == 0
