"""What the security page promises, one test a promise; those of the control connection and of checkpoints lie in
tests/launch/test_secure_link.py, tests/launch/test_transport.py and tests/checkpoints/test_hostile.py."""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import pty
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from samestep.launch.output import console
from samestep.launch.output.console import NonBlockingWriter
from samestep.launch.output.lines import strip_control

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "samestep").rglob("*.py"))
BY_PICKLE = {  # functions and their results between processes of one user, and files that the user asks to convert
    "launch/functions/pool.py",
    "launch/functions/calls.py",
    "launch/rank/observers.py",
    "launch/start/prefork_server.py",
    "launch/functions/spawn.py",
    "checkpoints/convert_worker.py",
}
OWN_CODE = {
    "launch/rank/script.py": "exec",
    "pipelines/splitting.py": "exec",
}  # the user's script; what torch.fx has written
OWN_FILES = {"verification/judging/record.py"}  # what verify's own ranks have put into its own private folder
FORBIDDEN = {"eval", "exec", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}


@functools.cache
def nodes(path):
    """All nodes of the tree of a source file."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def calls(path):
    """The names that a file calls, with their lines."""
    for node in nodes(path):
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
        for node in nodes(path)
        if (isinstance(node, ast.Import) and {"pickle", "cloudpickle"} & {name.name for name in node.names})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module in {"pickle", "cloudpickle"}
            and not {name.name for name in node.names} <= {"PicklingError", "UnpicklingError"}  # errors read nothing
        )
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


ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}  # for which the session's fork server has imported torch


def test_nobody_else_can_read_what_a_run_leaves_behind(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-P", "-m", "samestep", "run", "-n", "2", "train.py"]
    old = os.umask(0o022)
    try:
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False, env=ONE_THREAD
        )
    finally:
        os.umask(old)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    steps = list((tmp_path / "kept").glob("step-*"))
    assert steps
    private = [run, tmp_path / "kept", *steps]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o700}
    files = [path for folder in (run, *steps) for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 8
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
    assert strip_control(line) == shown


def on_a_terminal(folder, *words):
    """Runs samestep at a terminal; returns its exit code and what it has written there."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-P", "-m", "samestep", *words]
    process = subprocess.Popen(command, cwd=folder, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL)
    os.close(follower)
    said = b""
    with contextlib.suppress(OSError):  # so a terminal ends
        while piece := os.read(leader, 65536):
            said += piece
    os.close(leader)
    return process.wait(timeout=100), said


def test_a_rank_cannot_rename_or_clear_the_terminal(tmp_path):
    text = r"import sys; print('\x1b]0;owned\x07\x1b[2Jhello'); sys.exit('\x1b[2Jbad\x1b]0;owned\x07 end')"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    code, said = on_a_terminal(tmp_path, "run", "-n", "3", "train.py")
    assert code == 1
    others = [line for line in said.splitlines() if b"rank" in line and not line.startswith(b"\x1b]0;owned")]
    assert b"bad end" in said
    assert not any(b"\x1b]0;" in line or b"\x1b[2J" in line for line in others if b"[rank 0]" not in line)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["run", "--settings", "given", "train.py"], '"a\\u001b[2Jb" = 1'),
        (["plan", "--cluster", "given", "train.py"], '"a\\u001b[2Jb" = 1'),
    ],
)
def test_a_file_that_is_refused_cannot_clear_the_terminal_by_its_words(tmp_path, words, text):
    (tmp_path / "given").write_text(text, encoding="utf-8")
    (tmp_path / "train.py").touch()
    code, said = on_a_terminal(tmp_path, *words)
    assert code == 2
    assert b"samestep: error: " in said
    assert b"ab" in said
    assert b"\x1b" not in said


def test_what_the_launcher_says_of_a_script_cannot_clear_the_terminal(tmp_path, monkeypatch):
    leader, follower = pty.openpty()
    monkeypatch.setattr(
        console, "open_writers", lambda: {"out": NonBlockingWriter(follower), "err": NonBlockingWriter(follower)}
    )
    shown = console.Console([tmp_path], drawn=())
    shown.tell("group evil\x1b[2J\x1b]0;owned\x07: rank 0 waits\n    in \x1b[3Aline 7")
    shown.close()
    said = os.read(leader, 65536)
    os.close(leader)
    os.close(follower)
    assert said == b"samestep: group evil: rank 0 waits\r\n    in line 7\r\n"


# --- what there is not ---------------------------------------------------------------------------

SERVERS = {"http", "socketserver", "wsgiref", "xmlrpc", "aiohttp", "flask", "fastapi", "uvicorn", "tornado"}
DOWNLOADS = {"urllib.request", "requests", "httpx", "urllib3", "ftplib", "http.client", "huggingface_hub", "torch.hub"}
OTHER_FORMATS = {"yaml", "shelve", "dill", "joblib", "configparser", "cPickle", "xml"}
IN_MEMORY = {"reporting/run_log.py"}  # what it has itself packed, and never a file
BY_NAME = {  # a table's, a function's own or the user's word on the command line, and never what a file says
    *("__init__.py", "bench/__init__.py", "cli/__init__.py", "recipes/models.py", "runtime/mpi/library.py"),
    *(
        "launch/functions/calls.py",
        "launch/start/fork.py",
        "launch/start/prefork_server.py",
        "launch/rank/observers.py",
        "launch/functions/forwarder.py",
    ),
}


def imports(path):
    """The modules that a file imports, wherever it does."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("unwanted", [SERVERS, DOWNLOADS, OTHER_FORMATS], ids=["servers", "downloads", "formats"])
def test_nothing_serves_pages_downloads_or_reads_formats_that_run_code(unwanted):
    found = [
        f"{place(path)} {name}"
        for path in SOURCES
        for name in imports(path)
        if any(name == one or name.startswith(f"{one}.") for one in unwanted)
    ]
    assert found == []


def test_what_is_marshalled_is_ones_own():
    assert {place(path) for path in SOURCES if "marshal" in imports(path)} == IN_MEMORY


def test_no_module_is_imported_because_a_file_says_so():
    users = {place(path) for path in SOURCES for name, _ in calls(path) if name in {"import_module", "__import__"}}
    assert users <= BY_NAME


def test_what_is_installed_along_is_what_is_needed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in project["dependencies"]}
    assert needed == {"torch", "numpy", "safetensors", "filelock", "rich", "jinja2", "cloudpickle", "xxhash"}


def test_the_policy_says_where_its_limits_are():
    policy = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    beyond = policy.partition("## Out of scope")[2]
    assert "a rank of the run itself that was taken over" in beyond.lower()
    assert "the store, gloo, NCCL" in beyond
    assert "## Supported versions" in policy


def test_no_name_in_the_shared_temporary_directory_can_be_guessed():
    named = [
        f"{place(path)}:{node.lineno} {node.value!r}"
        for path in SOURCES
        for node in nodes(path)
        if isinstance(node, ast.Constant) and str(node.value).startswith(("/tmp", "/var/tmp"))
    ]
    assert named == []
    users = {place(path) for path in SOURCES for name, _ in calls(path) if name in {"gettempdir", "mktemp"}}
    assert users == {"paths.py"}  # in a folder of the user's own, which is looked at first
