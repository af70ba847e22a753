"""`samestep.spawn`: results in rank order, failures in the caller, from anywhere."""

from __future__ import annotations

import os
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
        "import samestep, torch\n"
        "BACKEND = torch.backends.cudnn\n"  # a module object that no pickle takes
        "def flag(): return BACKEND.__name__\n"
        "if __name__ == '__main__': print(samestep.spawn(flag, 2))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "inner"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "['torch.backends.cudnn', 'torch.backends.cudnn']", done.stderr
