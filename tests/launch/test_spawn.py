"""`samestep.spawn`: results in rank order, failures in the caller, from anywhere."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap

import pytest

import samestep
from samestep.errors import RankFailure, UsageError


def name(prefix):
    return prefix + os.environ["RANK"]


def total():
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(value)
    dist.destroy_process_group()
    return value


def refuse():
    if os.environ["RANK"] == "1":
        raise ValueError("not on this rank")


def be_killed():
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_results_come_in_rank_order():
    assert samestep.spawn(name, 3, "r") == ["r0", "r1", "r2"]


def test_tensors_come_back():
    assert [value.item() for value in samestep.spawn(total, 2)] == [3.0, 3.0]


def test_the_rank_that_raised_is_named_with_its_traceback():
    with pytest.raises(RankFailure, match="rank 1 of 2 failed: ValueError: not on this rank") as failure:
        samestep.spawn(refuse, 2)
    assert failure.value.rank == 1
    assert 'raise ValueError("not on this rank")' in str(failure.value)


def test_the_rank_that_was_killed_is_named():
    with pytest.raises(RankFailure, match="SIGKILL") as failure:
        samestep.spawn(be_killed, 2)
    assert (failure.value.rank, failure.value.exit_code) == (1, 137)


def test_ranks_that_give_no_answer_in_time_are_ended():
    with pytest.raises(RankFailure, match="gave no answer within 0.5 s"):
        samestep.spawn(signal.pause, 2, timeout=0.5)


def test_a_world_without_ranks_is_refused():
    with pytest.raises(UsageError, match="at least one rank, not 0"):
        samestep.spawn(name, 0)


def python(*command, **options):
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, check=False, **options
    )


def test_a_script_needs_no_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""import os, samestep
def double(): return 2 * int(os.environ["RANK"])
print(samestep.spawn(double, 2))
""")
    done = python(str(script))
    assert done.stdout == "[0, 2]\n", done.stderr


def test_functions_typed_at_a_prompt_work():
    done = python("-c", "import samestep\ndef f(x): return x + OFFSET\nOFFSET = 5\nprint(samestep.spawn(f, 2, 1))")
    assert done.stdout == "[6, 6]\n", done.stderr


def test_ctrl_c_in_the_caller_stops_the_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, samestep
        def stay(parent, file):
            with open(f"{file}{os.environ['RANK']}.tmp", "w") as draft:
                draft.write(str(os.getpid()))
            os.rename(draft.name, f"{file}{os.environ['RANK']}")
            while not all(os.path.exists(f"{file}{rank}") for rank in "01"):
                pass
            if os.environ["RANK"] == "0":
                os.kill(parent, signal.SIGINT)
            signal.pause()
        if __name__ == "__main__":
            samestep.spawn(stay, 2, os.getpid(), "pid")
        """)
    )
    done = python(str(script), cwd=tmp_path)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    for rank in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)


def test_a_function_of_a_module_run_by_its_name_is_sent_by_that_name(tmp_path):
    (tmp_path / "inner.py").write_text(
        "import samestep, types\n"
        "class Module(types.ModuleType):\n"  # no pickle takes one
        "    def __reduce_ex__(self, _): raise TypeError('cannot be pickled')\n"
        "BACKEND = Module('backend')\n"
        "def flag(): return BACKEND.__name__\n"
        "if __name__ == '__main__': print(samestep.spawn(flag, 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "inner"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "['backend', 'backend']", done.stderr


def test_in_a_script_the_ranks_write_straight_to_where_it_writes():
    whole_lines = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = python("-c", "import samestep; samestep.spawn(print, 2, 'a', 'b')", env=whole_lines)
    assert done.stdout == "a b\n" * 2, done.stderr


def test_lines_follow_where_the_caller_redirects_them(capsys):
    samestep.spawn(print, 2, "alike")
    assert sorted(capsys.readouterr().out.splitlines()) == ["[rank 0] alike", "[rank 1] alike"]


def test_a_status_that_nobody_watches_is_a_plain_line_on_request():
    done = python("-c", "import samestep, time; samestep.spawn(time.sleep, 1, 1.1, progress=True)")
    assert re.fullmatch(r"sleep  1 rank returned  \d s\n", done.stderr)
    assert done.stdout == ""


class Terminal:
    """A script on a terminal, and what it shows."""

    def __init__(self, script):
        self.master, slave = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), slave)
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        self.process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], env=environment, **streams)
        os.close(slave)
        self.shown = ""

    def read_until(self, pattern):
        while not re.search(pattern, self.shown):
            self.shown += os.read(self.master, 1 << 16).decode()

    def read_all(self):
        with contextlib.suppress(OSError):  # EIO: nobody has it open any more
            self.read_until("(?!)")
        assert self.process.wait() == 0
        return self.shown


@pytest.fixture
def terminal():
    with contextlib.ExitStack() as stack:

        def make(script):
            made = Terminal(script)
            stack.callback(os.close, made.master)
            stack.callback(made.process.wait)
            stack.callback(made.process.kill)
            return made

        yield make


def test_on_a_terminal_the_status_stands_below_the_lines_and_goes_in_the_end(terminal, tmp_path):
    os.mkfifo(tmp_path / "gate")
    gate = os.open(tmp_path / "gate", os.O_RDWR)
    screen = terminal(f"""
        import os, samestep
        def wait():
            os.read(os.open({str(tmp_path / "gate")!r}, os.O_RDONLY), 1)
            print("rank", os.environ["RANK"])
        samestep.spawn(wait, 2)
        print("end")
    """)
    screen.read_until("wait  0 of 2 ranks returned")
    os.write(gate, b"go")
    shown = screen.read_all()
    os.close(gate)
    erased = "\x1b[1A\x1b[2K"
    assert f"{erased}[rank 0] rank 0\r\n" in shown or f"{erased}[rank 1] rank 1\r\n" in shown
    assert {"[rank 0] rank 0", "[rank 1] rank 1"} <= {line.rpartition("\x1b[2K")[2] for line in shown.split("\r\n")}
    assert shown.rpartition("returned")[2].count("\x1b[?25h") == 1, "the cursor is back"
    assert shown.endswith("end\r\n")


def test_on_a_terminal_without_a_status_the_ranks_have_it_to_themselves(terminal):
    screen = terminal("""
        import samestep, sys
        def tell():
            print(sys.stdout.isatty())
        samestep.spawn(tell, 1, progress=False)
    """)
    assert screen.read_all() == "True\r\n"
