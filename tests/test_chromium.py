"""The browser of the tests, where a machine is busy: it is given up when it idles, and not when it is starved."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import chromium
from chromium import PROGRAM, Browser

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="there is no chromium on this machine"),
    pytest.mark.prove,
]

SEEN = """data:text/html,<div style='height:4000px'></div><p id=end>.</p><script>seen = 0;
new IntersectionObserver((all) => all.forEach((one) => seen += one.isIntersecting)).observe(end)</script>"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


def test_a_page_behind_another_one_is_drawn(browser):
    session, browser._session = browser._session, None
    try:
        other = browser.call("Target.createTarget", url="about:blank")["targetId"]
        browser.call("Target.activateTarget", targetId=other)
    finally:
        browser._session = session
    browser.open(SEEN)
    browser.evaluate("end.scrollIntoView()")
    browser.settle()
    assert browser.evaluate("seen") == 1


def test_a_frame_that_does_not_come_is_waited_for_as_long_as_the_page_answers(browser, monkeypatch):
    """Whoever draws is stopped, as on a machine without a core for it; the page goes on."""
    monkeypatch.setattr(chromium, "PATIENCE", 2)
    (drawer,) = drawers(browser)
    browser.open(SEEN)
    browser.settle()
    os.kill(drawer, signal.SIGSTOP)
    again = threading.Timer(4.0, os.kill, (drawer, signal.SIGCONT))
    again.start()
    try:
        browser.evaluate("end.scrollIntoView()")
        browser.settle()
    finally:
        again.join()
    assert browser.evaluate("seen") == 1


def test_a_browser_that_computes_is_not_given_up(browser, monkeypatch):
    monkeypatch.setattr(chromium, "PATIENCE", 2)
    assert browser.evaluate("(() => { const end = Date.now() + 5000; while (Date.now() < end); return 7; })()") == 7


def test_a_browser_that_idles_is_given_up(browser, monkeypatch):
    monkeypatch.setattr(chromium, "PATIENCE", 2)
    with pytest.raises(AssertionError, match="says nothing, and does nothing"):
        browser.evaluate("new Promise(() => {})")


def drawers(browser):
    """Returns the processes of a browser that draw."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            draws = b"--type=gpu-process" in process.joinpath("cmdline").read_bytes()
            if draws and chromium._fields(process)[2] == str(browser._process):
                yield int(process.name)
        except OSError:
            continue
