"""The page of a report in a real browser: it draws, asks for nothing, and can be used without a mouse."""

from __future__ import annotations

import math

import pytest
from made_runs import OWN, T0, Made

from chromium import PROGRAM, Browser
from samestep.reporting.analysis import analyse
from samestep.reporting.page import render_page
from samestep.reporting.run_log import PackingReader, open_run
from samestep.reporting.summary import summary

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="there is no chromium on this machine")

SECTIONS = ["summary", "time", "values", "pipeline", "ranks", "data", "checkpoints", "findings", "environment"]
DRAWN = "[...document.querySelectorAll('.chart .main-svg')].length"
FOCUS = "document.activeElement.id || document.activeElement.textContent"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture
def browser(chromium):
    chromium.forget()
    return chromium


def page_of(made, name="report.html"):
    found = analyse(open_run(made.path, PackingReader))
    file = made.path / name
    file.write_text(render_page(found, summary(found, T0 + 100)), encoding="utf-8", errors="backslashreplace")
    return file.as_uri()


def everything(path):
    """A run that has something of everything, under hostile names."""
    made = Made(
        path,
        ranks=3,
        steps=40,
        buckets=3,
        own=lambda rank, step: OWN | {"backward": 8_000 + 2_000 * (rank == 1)},
        work=lambda rank, step: {"samples": 8, "weight": 80 + rank, "epoch": step // 20},
        values=lambda rank, step: {"<b onmouseover=hit()>loss": "nan" if step == 9 else 1 / step, "rate": 0.1},
        about={"command": ["<script>hit()</script>.py"]},
    )
    made.write()
    made.find(cause="<script>hit()</script><img src=x onerror=hit()>")
    made.say("straggler", "rank 1 is slow", 1)
    made.append(0, "checkpoint", 20, seconds=0.4, path="runs/x", bytes=10**8, reason=None)
    for rank in range(3):
        actions = [["F", rank, 0, 0.001 * rank, 0.001 + 0.001 * rank], ["B", rank, 0, 0.008 - 0.002 * rank, 0.009]]
        made.append(rank, "pipeline", 3, schedule="<i>1F1B", stages=3, actions=actions)
    return made


def scroll_through(browser):
    """Shows every section once, so that all that is drawn when it is seen gets drawn."""
    for name in SECTIONS:
        browser.evaluate(f"document.getElementById('{name}')?.scrollIntoView()")
        browser.settle()


def test_every_chart_is_drawn_nothing_complains_and_no_script_of_others_runs(browser, tmp_path):
    address = page_of(everything(tmp_path))
    browser.before_each_page("window.hits = 0; window.hit = () => (hits += 1)")
    browser.open(address)
    scroll_through(browser)
    assert browser.evaluate("[...document.querySelectorAll('main > section')].map((each) => each.id)") == SECTIONS
    visible = "[...document.querySelectorAll('.chart')].filter((each) => each.offsetParent)"
    assert browser.evaluate(f"{visible}.length") == 4  # a timeline, two curves, a pipeline
    assert browser.evaluate(f"{visible}.every((each) => each.querySelector('.main-svg'))")
    assert browser.evaluate("document.querySelectorAll('#timeline .barlayer .point').length") > 3 * 5
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for tab in ("course", "heat"):
        browser.evaluate(f"document.getElementById('tab-{tab}').click()")
        browser.settle()
    assert browser.evaluate("hits") == 0
    assert browser.complaints == []
    assert [url for url in browser.requests if not url.startswith(("data:", "blob:"))] == [address]


@pytest.mark.prove
def test_a_script_that_got_into_the_page_would_not_run(browser, tmp_path):
    browser.before_each_page("window.hits = 0; window.hit = () => (hits += 1)")
    made = everything(tmp_path)
    file = tmp_path / "report.html"
    page_of(made)
    file.write_text(file.read_text().replace("<main>", "<main><script>hit()</script><img src='x' onerror='hit()'>"))
    browser.open(file.as_uri())
    browser.settle()
    assert browser.evaluate("hits") == 0
    assert browser.evaluate(DRAWN) > 0


@pytest.mark.prove
def test_the_page_can_be_used_without_a_mouse(browser, tmp_path):
    browser.open(page_of(everything(tmp_path)))
    browser.press("Tab")
    assert browser.evaluate(FOCUS) == "Skip to the summary"
    browser.press("Tab")
    assert browser.evaluate(FOCUS) == "theme"
    assert "solid" in browser.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    browser.press("Enter")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    browser.evaluate("document.getElementById('tab-step').focus()")
    browser.press("ArrowRight")
    assert browser.evaluate(FOCUS) == "tab-course"
    assert browser.evaluate(
        "[document.getElementById('panel-step').hidden, document.getElementById('panel-course').hidden]"
    )
    browser.press("End")
    browser.settle()
    assert browser.evaluate("document.getElementById('tab-heat').getAttribute('aria-selected')") == "true"
    assert browser.evaluate("document.querySelectorAll('#heat .main-svg').length > 0")
    browser.press("Home")
    assert browser.evaluate(FOCUS) == "tab-step"


@pytest.mark.prove
def test_another_step_is_drawn_when_it_is_chosen(browser, tmp_path):
    made = Made(tmp_path, steps=30, own=lambda rank, step: OWN | {"forward": 50_000 if step == 17 else 4_000})
    made.write()
    browser.open(page_of(made))
    scroll_through(browser)
    before = browser.evaluate("document.getElementById('timeline')._fullLayout.xaxis.range[1]")
    browser.evaluate(
        "(() => { const list = document.getElementById('step');"
        "list.value = [...list.options].find((each) => each.text.startsWith('17:')).value;"
        "list.dispatchEvent(new Event('change')); })()"
    )
    browser.settle()
    after = browser.evaluate("document.getElementById('timeline')._fullLayout.xaxis.range[1]")
    assert before < 30
    assert after > 60
    assert "64.0 ms" in browser.evaluate("document.getElementById('step-told').textContent")


@pytest.mark.prove
def test_light_and_dark_follow_the_system_and_the_button(browser, tmp_path):
    browser.open(page_of(everything(tmp_path)))

    def ground():
        return browser.evaluate("getComputedStyle(document.body).backgroundColor")

    browser.prefer("dark")
    dark = ground()
    browser.prefer("light")
    light = ground()
    assert dark != light
    browser.evaluate("document.getElementById('theme').click()")
    assert ground() == dark
    browser.evaluate("document.getElementById('theme').click()")
    assert ground() == light


@pytest.mark.prove
def test_a_narrow_window_needs_no_scrolling_sideways(browser, tmp_path):
    browser.resize(360, 800)
    browser.open(page_of(everything(tmp_path)))
    scroll_through(browser)
    assert browser.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.prove
def test_everything_is_printed(browser, tmp_path):
    browser.open(page_of(everything(tmp_path)))
    browser.settle()  # the page listens for printing once it has unpacked what draws
    browser.print(tmp_path / "report.pdf")
    browser.settle()
    assert browser.evaluate("[...document.querySelectorAll('.chart')].every((each) => each.querySelector('.main-svg'))")
    assert browser.evaluate("document.getElementById('panel-heat').hidden")  # again, behind it
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.prove
def test_ten_thousand_steps_of_eight_ranks_open(browser, tmp_path, capsys):
    made = Made(
        tmp_path,
        ranks=8,
        steps=10_000,
        buckets=1,
        own=lambda rank, step: OWN | {"backward": 8_000 + 300 * ((7 * rank + step) % 11)},
        values=lambda rank, step: {"loss": 1 / math.sqrt(step)} if rank == 0 else {},
    )
    made.write()
    address = page_of(made)
    browser.open(address)
    browser.settle()
    scroll_through(browser)
    assert browser.complaints == []
    assert browser.evaluate(DRAWN) > 0
    size = (tmp_path / "report.html").stat().st_size
    took = browser.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd")
    first = browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    with capsys.disabled():
        print(f"\n8 ranks, 10,000 steps: {size / 1e6:.1f} MB, text after {first:.0f} ms, all there after {took:.0f} ms")
    assert size < 6e6
