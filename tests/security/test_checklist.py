"""What the security page promises, one test a promise; those of the control connection and of checkpoints lie in
tests/launch/test_wire.py, tests/launch/test_transport.py and tests/running/checkpoints/test_hostile.py."""

from __future__ import annotations

import ast
import os
import pty
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from samestep.launch.terminal import harmless

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "samestep").rglob("*.py"))
BY_PICKLE = {  # functions and their results between processes of one user, and files that the user asks to convert
    "launch/pool.py",
    "launch/calls.py",
    "launch/observers.py",
    "launch/nursery.py",
    "launch/spawn.py",
    "running/checkpoints/foreign.py",
}
OWN_CODE = {"launch/script.py": "exec", "pipelines/cutting.py": "exec"}  # the user's script; what torch.fx has written
OWN_FILES = {"verification/judging/record.py"}  # what verify's own ranks have put into its own private folder
FORBIDDEN = {"eval", "exec", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}


def calls(path):
    """The names that a file calls, with their lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            yield name, node


def place(path):
    return str(path.relative_to(ROOT / "src" / "samestep"))


def test_pickle_is_read_where_it_must_be_and_nowhere_else():
    users = {
        place(path)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Import) and {"pickle", "cloudpickle"} & {name.name for name in node.names})
        or (isinstance(node, ast.ImportFrom) and node.module in {"pickle", "cloudpickle"})
    }
    assert users <= BY_PICKLE


def test_no_text_is_run_as_code_and_no_object_travels_by_torchs_pickling_collectives():
    found = [
        f"{place(path)}:{node.lineno} {name}"
        for path in SOURCES
        for name, node in calls(path)
        if name in FORBIDDEN
        and not (name == "eval" and isinstance(node.func, ast.Attribute))  # model.eval()
        and OWN_CODE.get(place(path)) != name
    ]
    assert found == []


def test_torch_loads_weights_only():
    loads = [
        (place(path), {word.arg: ast.unparse(word.value) for word in node.keywords})
        for path in SOURCES
        for name, node in calls(path)
        if name == "load" and ast.unparse(node.func) == "torch.load" and place(path) not in OWN_FILES
    ]
    assert loads
    assert all(words.get("weights_only") == "True" for _, words in loads), loads


def test_no_command_goes_through_a_shell():
    shells = [
        f"{place(path)}:{node.lineno}"
        for path in SOURCES
        for name, node in calls(path)
        if ast.unparse(node.func) in {"os.system", "os.popen"} or any(word.arg == "shell" for word in node.keywords)
    ]
    assert shells == []


SCRIPT = """
import samestep, torch
with samestep.world() as world:
    state = samestep.checkpoint("kept", world, every=1, model=torch.nn.Linear(2, 2))
    state.commit()
    state.save()
    raise SystemExit(0)
"""


def test_nobody_else_can_read_what_a_run_leaves_behind(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "samestep", "run", "-n", "2", "train.py"]
    old = os.umask(0o022)
    try:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    finally:
        os.umask(old)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    steps = list((tmp_path / "kept").glob("step-*"))
    assert steps
    private = [run, tmp_path / "kept", *steps]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o700}
    files = [path for folder in steps for path in folder.iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}


# --- lines of others on this terminal ------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"plain \xc3\xa9 \xe2\x80\xa6\ttab", b"plain \xc3\xa9 \xe2\x80\xa6\ttab"),
        (b"\x1b[1;31mred\x1b[0m", b"\x1b[1;31mred\x1b[0m"),
        (b"\x1b[31mred", b"\x1b[31mred\x1b[0m"),
        (b"\x1b]0;title\x07a", b"a"),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", b"link"),
        (b"\x1b]52;c;ZXZpbA==", b""),
        (b"\x1b[2J\x1b[H\x1b[3A\x1b[?1049ha", b"a"),
        (b"\x1bPq#0\x1b\\a\x1bc\x1b(0b", b"ab"),
        (b"bell\x07back\x08\x7f", b"bellback"),
        (b"\xc2\x9b2Ja", b"2Ja"),
        (b"half \x1b[", b"half "),
        (b"half \x1b", b"half "),
    ],
)
def test_what_would_move_a_terminal_is_taken_out_of_a_line(line, shown):
    assert harmless(line) == shown


def test_a_rank_cannot_rename_or_clear_the_terminal(tmp_path):
    text = r"import sys; print('\x1b]0;owned\x07\x1b[2Jhello'); sys.exit('\x1b[2Jbad\x1b]0;owned\x07 end')"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    leader, follower = pty.openpty()
    command = [sys.executable, "-P", "-m", "samestep", "run", "-n", "3", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL)
    os.close(follower)
    said = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:
            break
        if not piece:
            break
        said += piece
    os.close(leader)
    assert process.wait(timeout=100) == 1
    others = [line for line in said.splitlines() if b"rank" in line and not line.startswith(b"\x1b]0;owned")]
    assert b"bad end" in said
    assert not any(b"\x1b]0;" in line or b"\x1b[2J" in line for line in others if b"[rank 0]" not in line)
