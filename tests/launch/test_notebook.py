"""`samestep.spawn` in the cells of a real kernel: what a person with a notebook sees, and what stays behind."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from deadline import in_time

nbclient = pytest.importorskip("nbclient", reason="nbclient runs notebooks here, and is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is the kernel of these notebooks, and is not installed")

import nbformat  # noqa: E402  (comes with nbclient)
from jupyter_client.manager import AsyncKernelManager  # noqa: E402

PATIENCE = 100  # seconds for one cell
ENDS_WITHIN = 3.0  # seconds from an interrupt to the end of the cell


class Cell:
    """A cell that was run, as the notebook would be saved."""

    def __init__(self, outputs):
        self.outputs = outputs

    def text(self, name):
        """Returns what came on standard output or error."""
        return "".join(output.text for output in self.outputs if output.get("name") == name)

    def lines(self, name="stdout"):
        return sorted(self.text(name).splitlines())

    @property
    def result(self):
        (result,) = (output.data["text/plain"] for output in self.outputs if output.output_type == "execute_result")
        return result

    @property
    def error(self):
        """Returns name, message and traceback as the cell shows it, without colours."""
        (error,) = (output for output in self.outputs if output.output_type == "error")
        return error.ename, error.evalue, re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))

    @property
    def displays(self):
        return [output.data["text/plain"].rstrip() for output in self.outputs if output.output_type == "display_data"]


class Notebook(nbclient.NotebookClient):
    """A notebook whose kernel runs; `when` something is shown, somebody at the keyboard reacts."""

    def __init__(self, manager):
        super().__init__(nbformat.v4.new_notebook(), km=manager, timeout=PATIENCE, allow_errors=True)
        self.reactions = []
        self.shown = []

    def when(self, pattern, reaction):
        self.reactions.append((re.compile(pattern), reaction))

    def process_message(self, msg, cell, cell_index):
        content = msg["content"]
        shown = content.get("text") or content.get("data", {}).get("text/plain") or ""
        if msg["msg_type"] in {"stream", "display_data", "update_display_data"}:
            self.shown.append(shown)
        for item in [item for item in self.reactions if item[0].search("".join(self.shown))]:
            self.reactions.remove(item)
            item[1]()
        return super().process_message(msg, cell, cell_index)

    def interrupt(self):
        self.interrupted = time.monotonic()
        self.interrupting = asyncio.ensure_future(self.km.interrupt_kernel())

    def run(self, source):
        self.reactions, reactions = [], self.reactions
        for preparing in ("import os, samestep", source):
            self.shown.clear()
            self.nb.cells.append(nbformat.v4.new_code_cell(textwrap.dedent(preparing).strip()))
            cell = self.execute_cell(self.nb.cells[-1], len(self.nb.cells) - 1)
            self.reactions = reactions
        assert not self.reactions, "what was waited for was never shown"
        return Cell(cell.outputs)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernel")
    with tempfile.TemporaryDirectory() as sockets, pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, str(folder))
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # the kernel looks for it, and behaves otherwise
        manager = AsyncKernelManager(kernel_name="python3", transport="ipc", ip=f"{sockets}/k")  # no port to race for
        manager.kernel_spec.argv[0] = sys.executable
        notebook = Notebook(manager)
        with notebook.setup_kernel(cwd=str(folder), cleanup_kc=True):
            yield notebook


@pytest.fixture
def notebook(kernel):
    """A notebook in whose kernel no rank of any earlier cell is left."""
    kernel.reactions = []
    yield kernel
    kernel.reactions = []
    left = kernel.run("from samestep.launch.process import children\nprint(children(os.getpid()))")
    assert left.text("stdout") == "[]\n"


class Gate:
    """A named pipe that ranks wait at: each takes one byte, now or later."""

    def __init__(self, path):
        os.mkfifo(path)
        self.path = str(path)
        self.descriptor = os.open(path, os.O_RDWR)

    def open(self):
        os.write(self.descriptor, b"go" * 8)


@pytest.fixture
def gate(tmp_path):
    gate = Gate(tmp_path / "gate")
    yield gate
    os.close(gate.descriptor)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_results_of_a_function_of_a_cell_come_in_rank_order(notebook):
    cell = notebook.run("""
        offset = 10
        def place(word):
            return word, offset + int(os.environ["RANK"])
        samestep.spawn(place, 3, "rank")
    """)
    assert cell.result == "[('rank', 10), ('rank', 11), ('rank', 12)]"


def test_what_the_ranks_print_stands_in_the_cell_as_whole_lines(notebook):
    cell = notebook.run("""
        import sys
        def report():
            rank = os.environ["RANK"]
            for i in range(200):
                print("line", end=" ")
                sys.stdout.flush()  # a rank's line arrives in pieces, and must be shown in one
                print(rank, i)
            print("bad news", rank, file=sys.stderr)
            print("no newline", rank, end="")
        samestep.spawn(report, 2);
    """)
    expected = [f"[rank {rank}] line {rank} {i}" for rank in range(2) for i in range(200)]
    assert cell.lines() == sorted([*expected, "[rank 0] no newline 0", "[rank 1] no newline 1"])
    assert cell.lines("stderr") == ["[rank 0] bad news 0", "[rank 1] bad news 1"]
    ordered = [line for line in cell.text("stdout").splitlines() if line.startswith("[rank 1]")]
    assert ordered == [*expected[200:], "[rank 1] no newline 1"]


def test_the_lines_of_a_single_rank_have_no_label(notebook):
    cell = notebook.run("samestep.spawn(print, 1, 'hello');")
    assert cell.text("stdout") == "hello\n"


def test_lines_follow_where_the_cell_redirects_them(notebook):
    cell = notebook.run("""
        import contextlib, io
        with contextlib.redirect_stdout(io.StringIO()) as caught:
            samestep.spawn(print, 2, "alike")
        sorted(caught.getvalue().splitlines())
    """)
    assert cell.result == "['[rank 0] alike', '[rank 1] alike']"
    assert cell.text("stdout") == ""


def test_an_exception_names_the_rank_and_shows_the_line_of_the_cell(notebook):
    cell = notebook.run("""
        def fail():
            if os.environ["RANK"] == "1":
                raise LookupError("no such thing")  # this very line
        samestep.spawn(fail, 2)
    """)
    name, message, shown = cell.error
    assert name == "RankFailure"
    assert message.startswith("rank 1 of 2 failed: LookupError: no such thing")
    assert re.search(r'at Cell In\[\d+\], line 3  raise LookupError\("no such thing"\)  # this very line', message)
    assert re.search(r"Cell In\[\d+\], line 3, in fail\n    raise LookupError", message)
    assert "samestep.spawn(fail, 2)" in shown
    assert "_collect" not in shown, "a person need not see where spawn waits"


def test_a_call_that_lasts_says_how_far_the_ranks_are(notebook, gate):
    notebook.when(r"1 of 2 ranks returned  \d+ s  step 2 \(rank 0\) to 3 \(rank 1\)", gate.open)
    cell = notebook.run(f"""
        def train(gate):
            from samestep import progress
            rank = int(os.environ["RANK"])
            for _ in range(2 + rank):
                progress.count_step()  # as an optimizer does
            if rank == 1:
                os.read(os.open(gate, os.O_RDONLY), 1)
        samestep.spawn(train, 2, {gate.path!r});
    """)
    (last,) = cell.displays  # one output, updated in place
    assert re.fullmatch(r"train  2 ranks returned  \d+ s  step 2 \(rank 0\) to 3 \(rank 1\)", last)


def test_a_progress_bar_is_drawn_in_place_and_is_one_line_in_the_end(notebook, gate):
    notebook.when(r"0 of 1 rank returned  \d+ s\n 42%", gate.open)
    cell = notebook.run(f"""
        import sys
        def draw(gate):
            for share in range(101):
                sys.stderr.write(f"\\r {{share}}%")
                sys.stderr.flush()
                if share == 42:
                    os.read(os.open(gate, os.O_RDONLY), 1)
            print(file=sys.stderr)
        samestep.spawn(draw, 1, {gate.path!r});
    """)
    assert cell.text("stderr") == " 100%\n"
    (last,) = cell.displays
    assert re.fullmatch(r"draw  1 rank returned  \d+ s", last)


def test_nothing_is_drawn_for_a_call_that_asks_for_nothing(notebook):
    cell = notebook.run("""
        import time
        def last():
            time.sleep(1.2)  # by then a status would have been drawn
        samestep.spawn(last, 1, progress=False);
    """)
    assert cell.outputs == []


STAY = """
    import signal, subprocess
    def stay():
        if {ignoring}:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        print("at work", os.getpid(), child.pid)
        signal.pause()
    samestep.spawn(stay, 2)
"""


@pytest.mark.parametrize("ignoring", [False, True], ids=["ends at SIGTERM", "ignores SIGTERM"])
def test_interrupting_the_kernel_ends_all_ranks_and_what_they_started(notebook, ignoring):
    notebook.when(r"(?s)at work .*at work .*\n", notebook.interrupt)
    cell = notebook.run(STAY.format(ignoring=ignoring))
    took = time.monotonic() - notebook.interrupted
    name, _, shown = cell.error
    assert name == "KeyboardInterrupt"
    assert "samestep.spawn(stay, 2)" in shown
    pids = [int(pid) for line in cell.lines() for pid in line.split()[-2:]]
    assert len(pids) == 4
    assert [pid for pid in pids if is_running(pid)] == []
    assert ignoring or in_time(
        took, ENDS_WITHIN
    )  # who ignores the signal is given a grace, and a busy machine may add to it


def test_a_second_interrupt_while_the_ranks_are_being_ended_leaves_none(notebook):
    notebook.when(r"(?s)at work .*at work .*\n", notebook.interrupt)
    cell = notebook.run("""
        import signal
        def stay(kernel):
            signal.signal(signal.SIGTERM, lambda *_: os.kill(kernel, signal.SIGINT))
            print("at work", os.getpid())
            while True:
                signal.pause()
        samestep.spawn(stay, 2, os.getpid())
    """)
    assert cell.error[0] == "KeyboardInterrupt"
    assert [line for line in cell.lines() if is_running(int(line.split()[-1]))] == []


def test_the_kernel_goes_on_after_an_interrupt(notebook):
    notebook.when(r"(?s)at work .*at work .*\n", notebook.interrupt)
    notebook.run(STAY.format(ignoring=False))
    assert notebook.run("samestep.spawn(divmod, 2, 7, 3)").result == "[(2, 1), (2, 1)]"
