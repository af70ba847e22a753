"""`samestep watch` on a real terminal: what a person sees, presses, and finds again afterwards."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from made_runs import T0, Made

PATIENCE = 20.0  # seconds until something is there
COMMAND = [sys.executable, "-P", "-m", "samestep", "watch"]
SEQUENCE = re.compile(r"\x1b\[(\??)([\d;]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


class Screen:
    """What stands on a terminal, as far as `watch` may write to it: anything else is an error."""

    def __init__(self, columns, lines):
        self.cells = [[" "] * columns for _ in range(lines)]
        self.line = self.column = 0
        self.rest = ""
        self.modes = set()

    def feed(self, data):
        text, at = self.rest + data, 0
        while at < len(text) and (found := SEQUENCE.match(text, at)):
            at = found.end()
            private, numbers, letter, _, newline, plain = found.groups()
            if private:
                (self.modes.add if letter == "h" else self.modes.discard)(int(numbers))
            elif letter == "H":
                line, column = numbers.split(";") if numbers else (1, 1)
                self.line, self.column = int(line) - 1, int(column) - 1
            elif newline:
                self.line += 1
            elif plain:
                self.write(plain)
            else:
                assert letter == "m", found
        self.rest = text[at:]
        assert len(self.rest) < 20, self.rest

    def write(self, text):
        for letter in text:
            assert letter.isprintable(), text
            self.cells[self.line][self.column] = letter
            self.column += 1

    def __str__(self):
        return "\n".join("".join(line).rstrip() for line in self.cells)

    def row(self, text):
        """Returns the first line with a text, "" where there is none."""
        return next((line for line in str(self).splitlines() if text in line), "")


class Seat:
    """Somebody before a terminal, in which `watch` is running."""

    def __init__(self, *arguments, columns=100, lines=30, **options):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.screen = Screen(columns, lines)
        environment = {**os.environ, "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        files = {"stdin": self.slave, "stdout": self.slave, "stderr": self.slave}
        self.process = subprocess.Popen([*COMMAND, *map(str, arguments)], env=environment, **files, **options)

    def read(self):
        ready, _, _ = select.select([self.master], [], [], 0.1)
        if ready:
            self.screen.feed(os.read(self.master, 1 << 16).decode())

    def sees(self, what):
        """Reads until `what` (a text, or a function of the screen) is there."""
        seen = what if callable(what) else lambda screen: what in str(screen)
        due = time.monotonic() + PATIENCE
        while not seen(self.screen):
            assert time.monotonic() < due, f"no {what} in\n{self.screen}"
            self.read()

    def press(self, keys):
        os.write(self.master, keys.encode())

    def leaves(self, code=0):
        """The program ends, and the terminal is as it was."""
        due = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < due
            self.read()
        while select.select([self.master], [], [], 0)[0]:
            self.read()
        assert self.process.returncode == code
        self.is_as_before()

    def is_as_before(self):
        assert termios.tcgetattr(self.slave) == self.before
        assert self.screen.modes == {25}  # the cursor is shown; the alternate screen, 1049, is left

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def sit():
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            seat = Seat(*arguments, **options)
            stack.callback(seat.close)
            return seat

        yield start


@pytest.fixture
def made(tmp_path):
    made = Made(tmp_path / "run", ranks=3, steps=5, ended=lambda rank: False)
    made.path.mkdir()
    made.about = {"ended": None, "exit": None}
    made.write()
    for rank in range(3):
        made.file(rank).with_name(f"rank{rank}.out").write_text(f"hello from {rank}\n")
        made.file(rank).with_name(f"rank{rank}.err").write_text(f"warning of {rank}\n")
    return made


def further_step(made, rank, step):
    fields = {"steps": 1, "seconds": 0.02, "spent": {"forward": 0.02}, "spans": [], "more": 0, "buckets": []}
    fields["work"] = {}
    made.append(rank, "step", step, T0 + step, **fields)


def test_keys_choose_what_is_seen_and_q_leaves_the_terminal_as_it_was(sit, made):
    seat = sit(made.path)
    seat.sees("hello from 0")
    assert seat.screen.modes == {1049}
    assert termios.tcgetattr(seat.slave) != seat.before
    seat.press("\x1b[B")
    seat.sees("hello from 1")
    assert seat.screen.row("▸").split()[1] == "1"
    seat.press("j")
    seat.sees("hello from 2")
    seat.press("\t")
    seat.sees("warning of 2")
    seat.press("kk")
    seat.sees("warning of 0")
    seat.press("o")
    seat.sees("hello from 0")
    seat.press("?")
    seat.sees("the rank before, the next")
    seat.press("?f")
    seat.sees("nothing so far")
    seat.press("q")
    seat.leaves()


def test_what_is_new_is_seen_unless_it_is_paused(sit, made):
    seat = sit(made.path)
    seat.sees("step 5")
    further_step(made, 1, 6)
    seat.sees("step 6")
    made.say("straggler", "rank 2 is slow", 2)
    seat.sees(lambda screen: "slow" in screen.row("    2  "))
    seat.press(" ")
    seat.sees("PAUSED")
    further_step(made, 1, 7)
    with made.file(0).with_name("rank0.out").open("a") as output:
        output.write("more from 0\n")
    seat.press(" ")
    seat.sees("step 7")
    seat.sees("more from 0")
    seat.press("n")
    seat.sees("hello from 2")
    record = json.loads((made.path / "run.json").read_text())
    (made.path / "run.json").write_text(json.dumps(record | {"ended": T0 + 9, "exit": 3}))
    seat.sees("failed, exit code 3")
    assert seat.process.poll() is None
    seat.press("q")
    seat.leaves()


@pytest.mark.fresh_interpreter  # the second signal may come while it ends, which takes a fork with torch longer
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str)
def test_a_signal_leaves_the_terminal_as_it_was(sit, made, number, code):
    seat = sit(made.path)
    seat.sees("hello from 0")
    seat.process.send_signal(number)
    seat.process.send_signal(number)
    seat.leaves(code)


def test_control_c_is_no_error(sit, made):
    seat = sit(made.path, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
    seat.sees("hello from 0")
    seat.press("\x03")
    seat.leaves(0)


def test_control_z_gives_the_terminal_back_until_it_goes_on(sit, made):
    seat = sit(made.path)
    seat.sees("hello from 0")
    seat.process.send_signal(signal.SIGTSTP)
    seat.sees(lambda screen: screen.modes == {25})
    stat = Path(f"/proc/{seat.process.pid}/stat")
    seat.sees(lambda screen: stat.read_text().rpartition(")")[2].split()[0] == "T")
    seat.is_as_before()
    seat.screen.cells = [[" "] * 100 for _ in range(30)]
    seat.process.send_signal(signal.SIGCONT)
    seat.sees("hello from 0")
    assert seat.screen.modes == {1049}
    seat.press("q")
    seat.leaves()


def test_an_exception_leaves_the_terminal_as_it_was(sit, made):
    code = f"""if True:
        from samestep import cli
        from samestep.reporting.live import app as view
        screen, calls = view.Renderer.screen, []
        def fails(*arguments):
            calls.append(1)
            if len(calls) > 1:
                raise ZeroDivisionError("of the picture")
            return screen(*arguments)
        view.Renderer.screen = fails
        cli.main(["watch", {str(made.path)!r}])
    """
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=subprocess.PIPE, text=True, env=environment)
    assert "of the picture" in process.communicate(timeout=PATIENCE)[1]
    assert termios.tcgetattr(slave) == before
    written = os.read(master, 1 << 16)
    assert written.index(b"\x1b[?1049h") < written.index(b"\x1b[?1049l")
    assert written.endswith((b"\x1b[?25h", b"\x1b[?1049l"))
    os.close(master)
    os.close(slave)


def test_another_size_is_another_picture(sit, made):
    seat = sit(made.path)
    seat.sees("? keys")
    seat.screen = Screen(60, 20)
    fcntl.ioctl(seat.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
    seat.process.send_signal(signal.SIGWINCH)
    seat.sees(lambda screen: "quit" in str(screen).splitlines()[-1] and "hello from 0" in str(screen))
    seat.press("q")
    seat.leaves()


def test_a_run_directory_that_is_removed_is_told(sit, made):
    seat = sit(made.path)
    seat.sees("hello from 0")
    made.path.rename(made.path.with_name("elsewhere"))
    seat.sees("run is gone: ")  # the rest may stand in the next line
    seat.press("q")
    seat.leaves()


def test_colours_are_left_out_where_nobody_wants_them(sit, made):
    seat = sit("--once", made.path)
    seat.screen.write = lambda text: None
    seat.process.wait(PATIENCE)
    coloured = os.read(seat.master, 1 << 16).decode()
    assert re.search(r"\x1b\[[\d;]*48[\d;]*m", coloured)
    assert "1049" not in coloured
    done = subprocess.run([*COMMAND, "--once", made.path], capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout
    assert re.search(r"Dd*Ff+Bb+Ww+Oo*", done.stdout)


@pytest.fixture
def training(tmp_path):
    """Two ranks that all-reduce until a file is there."""
    (tmp_path / "train.py").write_text("""if True:
        import os, time, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        print("rank", dist.get_rank(), "begins", flush=True)
        stops = torch.zeros(1)
        while not stops:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            stops[0] = os.path.exists("stop")
            dist.all_reduce(stops)
            time.sleep(0.01)  # the work of a step: nobody waits for it
        dist.destroy_process_group()
        raise SystemExit(5)
    """)
    command = [sys.executable, "-P", "-m", "samestep", "run", "-n", "2", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield tmp_path
    (tmp_path / "stop").touch()
    process.wait(60)


def test_a_real_run_is_followed_to_its_end(sit, training):
    due = time.monotonic() + PATIENCE
    while not list(training.glob("runs/*/run.json")):
        assert time.monotonic() < due
        os.sched_yield()
    seat = sit(cwd=training)
    seat.sees("rank 0 begins")
    seat.press("j")
    seat.sees("rank 1 begins")

    def is_training(screen):
        steps = re.search(r" step (\d+) ", str(screen))
        return steps is not None and int(steps[1]) > 10 and re.search(r"    1 .* ms .*B", screen.row("▸"))

    seat.sees(is_training)
    (training / "stop").touch()
    seat.sees("failed, exit code 5")
    assert "runs/train-" in str(seat.screen).splitlines()[0]
    seat.press("q")
    seat.leaves()
