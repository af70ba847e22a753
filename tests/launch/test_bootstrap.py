"""How a rank leaves: with the code, the last words and the files that python alone would have left."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("sys.stdout.close()", 0),
        ("sys.stdout = None", 0),
        ("sys.stdout = sys.stderr = None", 0),
        ("class Tee:\n    def write(self, text): pass\nsys.stdout = Tee()", 120),
        ("sys.exit(256)", 0),
        ("sys.exit(-1)", 255),
        ("sys.exit(2**70)", 255),
        ("import threading\nthreading.Thread(target=sys.exit, args=(5,)).start()", 0),
        ("os.closerange(0, 500)\nraise ValueError", 120),  # it could not be shown
    ],
)
def test_a_rank_ends_with_the_code_that_python_would_end_with(folder, body, code):
    assert folder.run(folder.script(body)).returncode == code


def test_an_exit_code_that_is_zero_for_whoever_waits_is_no_failure(folder):
    done = folder.run("-n", 2, folder.script("if rank == 1:\n    sys.exit(256)"))
    assert done.returncode == 0, done.stderr
    assert folder.result["failure"] is None


def test_an_exit_of_the_scripts_own_is_shown_with_its_line_and_what_it_wrote_last(folder):
    done = folder.run("-n", 2, folder.script("def leave():\n    sys.exit(3)\nif rank == 1:\n    leave()"))
    assert done.returncode == 3
    assert "rank 1 of 2 failed: exit code 3\n    at train.py:13  sys.exit(3)\n    rank 1, host" in done.stderr
    done = folder.run("-n", 2, folder.script("if rank == 1:\n    sys.exit('no licence')"))
    assert "exit code 1\n    its last line: no licence\n    at train.py:13  sys.exit('no licence')\n" in done.stderr


def test_files_that_the_script_left_open_are_written_out(folder):
    script = folder.script("""
        import gzip
        plain, packed = open(f"plain{rank}", "w"), gzip.open(f"packed{rank}", "wt")
        plain.write("kept")
        packed.write("kept too")
        tail = sys.stdout
        sys.stdout = open(f"printed{rank}", "w")
        print("and this", end="")
        tail.write("and that")
    """)
    for start in ("fork", "spawn"):
        done = folder.run("-n", 2, "--start", start, script)
        assert done.returncode == 0, done.stderr
        assert (folder.path / "plain1").read_text() == "kept"
        assert (folder.path / "printed1").read_text() == "and this"
        assert (
            subprocess.run(["gzip", "-dc", folder.path / "packed1"], capture_output=True, check=True).stdout
            == b"kept too"
        )
        assert folder.logs()["rank1.out"] == "and that"
        subprocess.run(["rm", "-r", folder.path / "runs"], check=True)


@pytest.mark.parametrize("end", ["sys.exit(3)", "raise ValueError('of the child')", "pass"])
def test_what_a_forked_child_of_a_rank_ends_with_is_its_own(folder, end):
    script = folder.script(f"""
        if rank == 1:
            child = os.fork()
            if child == 0:
                {end}
            else:
                print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        if "child" not in globals() or child:
            join()
            print("trained", meet())
    """)
    done = folder.run("-n", 2, script)
    assert done.returncode == 0, done.stderr
    assert "[rank 0] trained 2" in done.stdout
    code = {"sys.exit(3)": 3, "pass": 0}.get(end, 1)
    assert f"[rank 1] child {code}\n" in done.stdout
    assert ("ValueError: of the child" in done.stderr) == ("raise" in end)


ODD = {
    "a message that raises": (
        "class Odd(Exception):\n    def __str__(self): raise KeyError('nested')\nerror = Odd()",
        "Odd: <exception str() failed>",
        "Odd: <exception str() failed>",
    ),
    "a current directory that is gone": (
        "import tempfile\nplace = tempfile.mkdtemp()\nos.chdir(place)\nos.rmdir(place)\nerror = ValueError('lost')",
        "ValueError: lost",
        "ValueError: lost",
    ),
    "a hook that raises": (
        "def hook(*_): raise KeyError('hook')\nsys.excepthook = hook\nerror = ValueError('first')",
        "ValueError: first",
        "Error in sys.excepthook",
    ),
    "no standard error": (
        "sys.stderr = None\nerror = ValueError('silent')",
        "ValueError: silent",
        "ValueError: silent",
    ),
}


@pytest.mark.parametrize(
    ("case", "start"),
    [*((case, "fork") for case in ODD), ("no standard error", "spawn"), ("a hook that raises", "spawn")],
)
def test_an_exception_is_told_and_shown_whatever_the_script_has_done_to_itself(folder, case, start):
    prepare, told, shown = ODD[case]
    guarded = "\n".join(f"    {line}" for line in prepare.splitlines())
    script = folder.script(f"if rank == 1:\n{guarded}\n    raise error\ntime.sleep(60)")
    done = folder.run("-n", 2, "--start", start, script)
    assert done.returncode == 1, done.stderr
    assert f"rank 1 of 2 failed: {told}" in done.stderr
    assert f"[rank 1] {shown}" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert folder.result["failure"]["where"].startswith("train.py:")


def test_a_message_of_many_megabytes_ends_the_run_and_is_kept_whole(folder):
    script = folder.script("if rank == 1:\n    raise ValueError('m' * 8_000_000)\ntime.sleep(60)")
    done = folder.run("-n", 2, script)
    assert done.returncode == 1
    assert "rank1.err has all" in folder.result["failure"]["message"]
    assert len(folder.result["failure"]["message"]) < 70_000
    assert "m" * 8_000_000 in folder.logs()["rank1.err"]


def test_a_real_time_signal_ends_its_rank_and_not_the_launcher(folder):
    script = folder.script("if rank == 1:\n    os.kill(os.getpid(), signal.SIGRTMIN + 2)\ntime.sleep(60)")
    done = folder.run("-n", 2, script)
    assert done.returncode == 128 + 36
    assert "rank 1 of 2 failed: it was killed by SIGRTMIN+2 (signal 36)" in done.stderr


@pytest.mark.parametrize(
    ("closed", "start"),
    [
        pytest.param((0, 1, 2), "fork", marks=pytest.mark.prove),
        pytest.param((0,), "spawn", marks=pytest.mark.prove),
        pytest.param((1,), "spawn", marks=pytest.mark.prove),
        pytest.param((2,), "spawn", marks=pytest.mark.prove),
        ((0, 1, 2), "spawn"),
        *(pytest.param((closed,), "fork", marks=pytest.mark.prove) for closed in (0, 1, 2)),
    ],
)
def test_a_launcher_without_standard_streams_runs_all_the_same(folder, closed, start):
    script = folder.script("open(f'ran{rank}', 'w').write(str(size))\nprint('out')")
    close = "import os, sys; [os.close(int(n)) for n in sys.argv[1]]; os.execv(sys.argv[2], sys.argv[2:])"
    command = [sys.executable, "-P", "-m", "samestep", "run", "-n", "2", "--start", start, script]
    done = subprocess.run(
        [sys.executable, "-c", close, "".join(map(str, closed)), *command],
        cwd=folder.path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [(folder.path / f"ran{rank}").read_text() for rank in range(2)] == ["2", "2"]
    assert folder.logs()["rank1.out"] == "out\n"
