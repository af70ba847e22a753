"""The page of a report: whole, short, and deaf to what a run is called."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
from html.parser import HTMLParser

import pytest
from made_runs import OWN, T0, Made
from plotly.offline import get_plotlyjs

from samestep.errors import UsageError
from samestep.files import write_atomic
from samestep.reporting.analysis import analyse
from samestep.reporting.page import check_library, embedded, render_page
from samestep.reporting.run_log import open_run
from samestep.reporting.summary import summary

HOSTILE = '</script><script>alert("&")</script><img src=x onerror=alert(1)>\x1b[31m\u202e\u2028'


class Elements(HTMLParser):
    """What a page is made of: elements with their attributes, and the text of scripts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.scripts, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        inside = self.found[-1][0] if self.found else ""
        (self.scripts if inside == "script" else self.words).append(data)

    def named(self, tag):
        return [attributes for name, attributes in self.found if name == tag]


def page_of(path):
    found = analyse(open_run(path))
    return render_page(found, summary(found, T0 + 100))


def data_of(page):
    return json.loads(re.search(r'id="charts">(.*?)</script>', page, re.DOTALL)[1])


def hostile_run(path):
    made = Made(
        path,
        buckets=2,
        values=lambda rank, step: {HOSTILE: step, "fine": "nan"},
        host=lambda rank: "<b>host",
        begin={"host": HOSTILE, "python": HOSTILE},
        about={
            "command": [HOSTILE],
            "exit": HOSTILE,
            "run_id": HOSTILE,
            "failure": {"rank": HOSTILE, "message": HOSTILE, "where": HOSTILE},
        },
    )
    made.write()
    made.find(code=HOSTILE, cause=HOSTILE, fix=HOSTILE, tensor=HOSTILE, where=HOSTILE, rank=HOSTILE, step=[HOSTILE])
    made.say("hang", HOSTILE, 0)
    made.append(0, "checkpoint", 4, seconds=math.inf, path=HOSTILE, bytes=10**50, reason=HOSTILE)
    for rank in range(2):
        actions = [[HOSTILE, 0, 0, 0.0, 1.0], ["F", 10**30, 0, 0.0, math.nan]]
        made.append(rank, "pipeline", 1, schedule=HOSTILE, stages=1, actions=actions)
    return path


def test_a_page_asks_for_nothing(tmp_path):
    page = page_of(Made(tmp_path, values=lambda rank, step: {"loss": 1.0}).write())
    elements = Elements(page)
    assert not elements.named("iframe") + elements.named("object") + elements.named("base")
    outside = [one for _, one in elements.found if one.get("src") or (one.get("href") or "#")[0] not in "#d"]
    assert outside == []
    (policy,) = [one["content"] for one in elements.named("meta") if "http-equiv" in one]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")


def test_only_the_pages_own_scripts_may_run(tmp_path):
    page = page_of(hostile_run(tmp_path))
    elements = Elements(page)
    (policy,) = [one["content"] for one in elements.named("meta") if "http-equiv" in one]
    allowed = set(re.findall(r"'sha256-([^']*)'", policy))
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    texts = [*scripts, get_plotlyjs()]  # which page.js unpacks
    assert len(scripts) == 1
    assert {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts} == allowed
    assert "unsafe-inline" not in policy.partition("style-src")[0]


def test_names_of_a_run_stay_names(tmp_path):
    page = page_of(hostile_run(tmp_path))
    elements = Elements(page)
    assert elements.named("img") == []
    assert len(elements.named("script")) == 3
    assert not any(name.startswith("on") for _, attributes in elements.found for name in attributes)
    assert "\x1b" not in page
    assert "\u202e" not in page.partition("plotly.js")[0]
    text = "".join(elements.words)
    assert '</script><script>alert("&")</script><img src=x onerror=alert(1)>\\x1b[31m\\u202e\\u2028' in text


def test_the_data_of_the_charts_ends_no_script_and_has_no_number_that_is_none(tmp_path):
    page = page_of(hostile_run(tmp_path))
    (text,) = re.findall(r'id="charts">([^<]*)</script>', page)
    assert not set("<>&\u2028\u2029\x1b") & set(text)
    assert HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e").replace("\u2028", "\\u2028") in {
        curve["name"] for curve in data_of(page)["curves"]
    }
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded([math.nan])


def test_a_long_run_makes_a_short_page(tmp_path):
    short = page_of(Made(tmp_path / "short", ranks=4, steps=30, buckets=4).write())
    made = Made(tmp_path / "long", ranks=4, steps=3_000, buckets=4, values=lambda rank, step: {"loss": 1 / step})
    page = page_of(made.write())
    assert len(page) < len(short) + 200_000
    data = data_of(page)
    assert len(data["heat"]["last"]) == len(data["course"]["steps"]) == 200
    assert len(data["moments"]) <= 21


def test_many_ranks_are_drawn_in_part_and_the_slow_ones_are_among_them(tmp_path):
    made = Made(tmp_path, ranks=150, steps=6, own=lambda rank, step: OWN | {"backward": 8_000 + 500 * (rank == 77)})
    data = data_of(page_of(made.write()))
    assert len(data["moments"][0]["lanes"]) == 64
    assert 77 in {lane[0] for lane in data["moments"][0]["lanes"]}
    assert len(data["heat"]["ranks"]) == 128
    assert 77 in data["heat"]["ranks"]


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_has_hardly_begun_is_a_page_too(tmp_path, ranks, steps):
    page = page_of(Made(tmp_path, ranks=ranks, steps=steps).write())
    assert f"{steps} step" in page


def test_a_run_of_which_only_the_launcher_knows_is_a_page_too(tmp_path):
    (tmp_path / "run.json").write_text('{"command": ["train.py"], "ranks": 2, "ended": 5, "exit": 1}')
    assert "No rank has written an event" in page_of(tmp_path)


def test_values_beyond_what_is_drawn_are_told(tmp_path):
    made = Made(tmp_path, steps=2, values=lambda rank, step: {f"value {number}": 1.0 for number in range(60)})
    page = page_of(made.write())
    assert len(data_of(page)["curves"]) == 48
    assert "12 more values are logged and not drawn" in page


def test_values_of_earlier_attempts_are_drawn_beside(tmp_path):
    for attempt in range(2):
        Made(tmp_path, attempt=attempt, values=lambda rank, step: {"loss": 1.0}).write()
    assert [curve["attempt"] for curve in data_of(page_of(tmp_path))["curves"]] == [1, 0]


def test_a_page_is_there_whole_or_not_at_all(tmp_path):
    file = tmp_path / "report.html"
    file.write_text("the one before")

    def pieces():
        yield "half"
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_atomic(file, pieces())
    assert file.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [file]


def test_without_the_chart_library_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError, match=r"pip install 'samestep\[report\]'"):
        check_library()
