"""The site: built as `make docs` builds it, whole, offline, and of one mind with the code.

What only the built site shows is run by `make prove`; its sources are compared with the code in `make test`.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest

import samestep
import samestep.compress
import samestep.testing
from chromium import PROGRAM, Browser
from samestep import errors
from samestep.cli import COMMANDS
from samestep.verification.pages import PAGES

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LOADED = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "object": "data",
}


class Page(HTMLParser):
    """What a page loads, what it links to, and the anchors and words in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.language = ""
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        told = dict(attributes)
        if "id" in told:
            self.anchors.add(told["id"])
        if tag == "html":
            self.language = told.get("lang", "")
        if tag == "a" and told.get("href"):
            self.links.append(told["href"])
        if told.get(LOADED.get(tag, "")):
            self.loads.append(told[LOADED[tag]])


class Site(NamedTuple):
    """Where it lies, and its pages by their place in it."""

    folder: Path
    pages: dict[str, Page]

    def anchors(self, page: str) -> set[str]:
        return self.pages[page].anchors


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for needed in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(needed, reason="the extra `docs` is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(DOCS), str(folder)]
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [*command[:3], "-d", str(tmp_path_factory.mktemp("doctrees")), *command[3:]],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    files = sorted(folder.rglob("*.html"))
    pages = {str(file.relative_to(folder)): Page(file.read_text(encoding="utf-8")) for file in files}
    return Site(folder, pages)


@pytest.mark.prove
def test_every_page_is_in_it(site):
    written = {str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md")}
    assert written <= set(site.pages)


@pytest.mark.prove
def test_no_page_loads_anything_from_elsewhere(site):
    foreign = [
        f"{name}: {place}" for name, page in site.pages.items() for place in page.loads if re.match(r"(\w+:)?//", place)
    ]
    assert foreign == []


@pytest.mark.prove
def test_neither_does_a_style_sheet(site):
    sheets = list(site.folder.rglob("*.css"))
    assert sheets
    foreign = re.compile(r"(@import|url\()\s*[\"']?(https?:)?//")
    assert [sheet.name for sheet in sheets if foreign.search(sheet.read_text(encoding="utf-8"))] == []


@pytest.mark.prove
def test_links_between_pages_lead_to_something_that_is_there(site):
    broken = []
    for name, page in site.pages.items():
        for link in page.links:
            target, _, anchor = link.partition("#")
            if re.match(r"\w+:", link):
                continue
            place = name if not target else os.path.normpath(Path(name).parent / target)
            exists = place in site.pages or (site.folder / place).is_file()
            if not exists or (anchor and place in site.pages and anchor not in site.anchors(place)):
                broken.append(f"{name}: {link}")
    assert broken == []


MODULES = [samestep, samestep.compress, samestep.testing]


def test_every_public_name_stands_in_the_references_source():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE))
    assert {f"samestep.{name}" for name in samestep.__all__} - named == set()


@pytest.mark.prove
@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_public_name_is_in_the_reference(site, module):
    anchors = site.anchors("reference.html")
    names = {f"{module.__name__}.{name}" for name in module.__all__}
    assert {name for name in names if not {name, f"module-{name}"} & anchors} == set()


@pytest.mark.prove
def test_every_command_is_on_its_page_with_its_options(site):
    text = site.pages["commands.html"].text
    for name in COMMANDS:
        assert f"samestep-{name}" in site.anchors("commands.html")
        assert f"usage: samestep {name}" in text
    assert "--on-hang" in text


@pytest.mark.prove
def test_every_finding_and_every_error_has_its_entry(site):
    anchors = site.anchors("codes.html")
    assert set(PAGES) <= anchors
    assert {name.lower() for name in errors.__all__} <= anchors


@pytest.mark.parametrize("page", ["codes", "commands", "reference"])
def test_a_page_is_what_its_script_writes(page):
    command = [sys.executable, f"scripts/{page}.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stdout.decode()


@pytest.mark.prove
def test_chinese_pages_say_so(site):
    assert {site.pages[f"zh/{page.stem}.html"].language for page in DOCS.glob("zh/*.md")} == {"zh-Hans"}


def test_chinese_pages_have_the_commands_of_the_english_ones():
    for page in sorted(DOCS.glob("zh/*.md")):
        assert blocks(page) == blocks(DOCS / page.name), f"zh/{page.name} has other blocks of code than {page.name}"


def blocks(page):
    """The blocks of code of a page, without what differs by language: comments, and whole lines of words."""
    found = re.findall(r"```\w*\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return [[line for line in map(command_of, block.splitlines()) if line] for block in found]


def command_of(line):
    """The command in a line, if there is one, without what is said of it."""
    known = re.match(r"\s*\$? ?((?:samestep|python3?|srun|mpiexec|pip|git|make)\b(?:(?!  |#).)*)", line)
    return known[1].strip() if known else ""


@pytest.mark.parametrize("page", ["start.md", "zh/start.md"])
def test_the_code_of_the_first_page_is_a_script(page):
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
    assert any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in ast.parse(code).body)


def test_the_script_of_the_first_page_prints_what_the_page_says(tmp_path):
    pytest.importorskip("sklearn", reason="its digits are the example's data")
    text = (DOCS / "start.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    epochs = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)", done.stdout, re.MULTILINE)]
    shown = [float(loss) for loss in re.findall(r"^epoch \d: loss ([\d.]+)", text, re.MULTILINE)][:5]
    assert epochs == pytest.approx(shown, rel=0.05)  # other processors round otherwise, and training amplifies it


def first_script(*diffs):
    """The script of the first page, with some of the page's diffs applied to it."""
    text = (DOCS / "start.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    found = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)
    for number in diffs:
        for old, new in re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", found[number], re.MULTILINE):
            old, new = ("".join(line[1:] for line in part.splitlines(keepends=True)) for part in (old, new))
            assert code.count(old) == 1, f"the script has no such lines: {old}"
            code = code.replace(old, new)
    return code


def started(folder, *command):
    """What a command of samestep prints, without what it says of itself."""
    done = subprocess.run(
        [sys.executable, "-m", "samestep", *command, "train.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return re.findall(r"epoch \d: loss .*", done.stdout)


@pytest.mark.prove
@pytest.mark.timeout(900)  # up to 13 runs of verify, each with the import of torch
@pytest.mark.parametrize(
    ("diffs", "ranks", "is_same"), [((0,), (1, 2), False), ((0, 1), (1, 2, 4), True), ((2,), (1, 2), True)]
)
def test_the_first_pages_changes_do_what_it_says(tmp_path, diffs, ranks, is_same):
    pytest.importorskip("sklearn", reason="its digits are the example's data")
    (tmp_path / "train.py").write_text(first_script(*diffs), encoding="utf-8")
    said = [started(tmp_path, "run", "--fresh", "-n", str(number)) for number in ranks]
    assert [len(one) for one in said] == [5] * len(ranks)
    assert all(one == said[0] for one in said[1:]) is is_same
    started(tmp_path, "verify")  # with exit code 0


CUT_OFF = """
[...document.querySelectorAll('article *')].filter((one) => {
  const box = one.getBoundingClientRect();
  if (box.width === 0 || box.right <= innerWidth + 1) return false;
  for (let above = one.parentElement; above; above = above.parentElement) {
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(above).overflowX) && above !== document.body &&
        above !== document.documentElement && above.getBoundingClientRect().right <= innerWidth + 1) return false;
  }
  return true;
}).slice(0, 3).map((one) => one.tagName + ': ' + one.textContent.slice(0, 60))
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if PROGRAM is None:
        pytest.skip("there is no chromium on this machine")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.mark.prove
@pytest.mark.parametrize("width", [420, 800, 1200, 1920])
def test_no_page_is_cut_off_at_the_right(site, browser, width):
    """What is too wide scrolls by itself, within the page."""
    cut = {}
    browser.resize(width, 900)
    for name in sorted(site.pages):
        browser.open((site.folder / name).as_uri())
        if found := browser.evaluate(CUT_OFF):
            cut[name] = found
    assert cut == {}


CARDS = """
[...document.querySelectorAll('table.cards')].map((table) => {
  const cells = [...table.querySelectorAll('tbody td:not(:first-child)')];
  return {
    scrolls: table.parentElement.scrollWidth > table.parentElement.clientWidth + 1,
    heads: [...table.querySelectorAll('th')].map((head) => head.textContent.trim()),
    names: [...new Set(cells.map((cell) => getComputedStyle(cell, '::before').content))],
  };
})
"""


@pytest.mark.prove
@pytest.mark.parametrize("page", ["symptoms", "zh/symptoms", "gallery"])
def test_in_a_narrow_window_a_table_of_words_is_cards_that_name_their_cells(site, browser, page):
    browser.resize(390, 800)
    browser.open((site.folder / f"{page}.html").as_uri())
    tables = browser.evaluate(CARDS)
    assert tables
    for table in tables:
        assert not table["scrolls"]
        assert {name.split('"')[1].strip() for name in table["names"]} == set(table["heads"][1:])


@pytest.mark.prove
def test_a_table_of_numbers_keeps_its_columns(site):
    tables = re.findall(r'<table class="docutils[^"]*">.*?</table>', site.pages["reporting.html"].text, re.DOTALL)
    assert tables
    assert any('class="docutils align-default"' in table for table in tables)


@pytest.mark.prove
def test_a_chinese_page_has_the_chinese_pages_first_in_its_list(site, browser):
    browser.resize(1280, 900)
    top = "Math.min(...[...document.querySelectorAll('.sidebar-tree > p')].map((e) => e.getBoundingClientRect().top))"
    first = f"[...document.querySelectorAll('.sidebar-tree > p')].find((e) => e.getBoundingClientRect().top === {top})"
    for page, caption in (("start", "Begin"), ("zh/start", "中文")):
        browser.open((site.folder / f"{page}.html").as_uri())
        assert browser.evaluate(f"{first}.textContent") == caption
