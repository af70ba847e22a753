"""A real browser without a window, driven over the DevTools protocol through two pipes: nothing but the stdlib.

us ── commands ──▶ 3 ┐ chromium     messages are JSON, each ended by a zero byte; answers bear the command's number,
us ◀── answers ─── 4 ┘              events a method
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import shutil
import signal
from base64 import b64decode
from collections import deque
from pathlib import Path

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE = 60  # seconds without a word, and without work or a wait for a core, after which the browser is given up
LONGEST = 600  # likewise, whatever it does meanwhile
FRAMES = 300  # seconds of the page's own clock without a frame, likewise
FRAME = """new Promise((done) => {
    requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(() => done(true))));
    setTimeout(() => done(false), 1000);
})"""
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--window-size=1280,900",
)


class Browser:
    """One browser with one page.

    Attributes:
        requests: addresses that the page has asked for.
        complaints: exceptions, and what the console and the browser call an error or a warning.
    """

    def __init__(self, folder):
        read, write = os.pipe(), os.pipe()
        self._out, self._in = read[1], write[0]
        high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in (read[0], write[1])]
        null = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, null, each) for each in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, end, place) for place, end in enumerate(high, 3)]
        command = [PROGRAM, *OPTIONS, f"--user-data-dir={folder}", "about:blank"]
        environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder)}
        self._process = os.posix_spawn(PROGRAM, command, environment, file_actions=actions, setpgroup=0)
        for end in (*high, read[0], write[1], null):
            os.close(end)
        self._rest, self._number, self._session = b"", 0, None
        self._events = deque()
        self.requests, self.complaints, self._scripts = [], [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        # A page behind another one is drawn no more, and the browser's own first one may come late, and before ours.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method, **parameters):
        """Sends a command; returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._hear()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, address):
        """Opens a page, and waits until it is ready: until its `load` event, and what is due then."""
        self._events.clear()
        self.call("Page.navigate", url=address)
        while "Page.loadEventFired" not in self._events:
            self._note(self._hear())

    def before_each_page(self, script):
        """Runs a script in every page before its own ones, until :meth:`forget`."""
        self._scripts.append(self.call("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"])

    def forget(self):
        """Makes the browser as it was when it was started, but for what it has compiled."""
        self.open("about:blank")
        while self._scripts:
            self.call("Page.removeScriptToEvaluateOnNewDocument", identifier=self._scripts.pop())
        self.call("Emulation.setEmulatedMedia", media="", features=[])
        self.call("Emulation.clearDeviceMetricsOverride")
        self.requests, self.complaints = [], []

    def evaluate(self, expression):
        """Returns what an expression of JavaScript gives; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def settle(self):
        """Waits until the page has painted what is due: as long as it answers that no frame has come yet."""
        for _ in range(FRAMES):
            if self.evaluate(FRAME):
                return
            self.call("Page.bringToFront")
        raise AssertionError(f"the page draws nothing: it is {self.evaluate('document.visibilityState')}")

    def press(self, key, *, shift=False):
        """Presses and releases a key, such as "Tab" or "ArrowRight"."""
        codes = {"Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39}
        told = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        if key in ("Enter", " "):
            told["text"] = "\r" if key == "Enter" else " "
        self.call("Input.dispatchKeyEvent", type="keyDown", **told)
        self.call("Input.dispatchKeyEvent", type="keyUp", **told)
        self.settle()

    def prefer(self, scheme):
        """Sets whether the person likes "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.settle()

    def resize(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.settle()

    def screenshot(self, file, *, whole=False):
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(b64decode(shot["data"]))

    def print(self, file):
        """Prints the page into a PDF."""
        file.write_bytes(b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)
        os.close(self._out)

    def _hear(self):
        while b"\0" not in self._rest:
            self._wait_for_words()
            block = os.read(self._in, 1 << 20)
            assert block, "the browser has ended"
            self._rest += block
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _wait_for_words(self):
        """A browser that works, or waits for a core on a busy machine, is given more time than one that idles."""
        idle = 0
        with selectors.DefaultSelector() as selector:
            selector.register(self._in, selectors.EVENT_READ)
            for _ in range(LONGEST):
                if selector.select(1.0):
                    return
                idle += not self._is_busy()
                assert idle < PATIENCE, "the browser says nothing, and does nothing"
        raise AssertionError(f"the browser says nothing for {LONGEST} s")

    def _is_busy(self):
        """Whether a thread of it runs, or would if there were a core for it, or somebody let it."""
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                is_ours = _fields(process)[2] == str(self._process)
                if is_ours and any(_state(task) in "RDT" for task in process.joinpath("task").iterdir()):
                    return True
        return False

    def _note(self, event):
        method, told = event.get("method"), event.get("params", {})
        self._events.append(method)
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(told["exceptionDetails"])
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(told["args"])
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])


def _fields(process):
    """Returns what the kernel says of a process or a thread: its state, parent, group, …"""
    return process.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()


def _state(task):
    try:
        return _fields(task)[0]
    except OSError:
        return "X"
