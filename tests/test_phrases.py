"""README and the English pages are plain: no word of a private language, and none that says too much."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name != "messages.md"),  # it quotes the code
]
PHRASES = {  # as a regular expression -> what to write
    r"mend(s|ed|ing)?( it)?": "fix",
    r"promis(es|ed|ing)": "target, guarantee",
    r"quick(er|est)": "faster, fastest",
    r"read in an afternoon": "a number that a test computes",
    r"whoever|whosoever": "the host that, the rank that",
    r"nobody|somebody": "no rank, another process",
    r"betimes|hitherto|thrice": "early, until now, three times",
    r"take[sn]? note": "record, observe",
    r"(a |by the |wayside )doors?": "source, entry point",
    r"nurser(y|ies)|nurslings?|herds?|mothers?": "fork server, forked process",
    r"shel(f|ves)|shelved": "channel, buffer",
    r"wish(es)?": "request",
    r"obituar(y|ies)|farewells?|mourn(s|ed)?|bur(y|ied)": "end message, lost peer, reaped",
    r"vigils?|pulses?|patience": "watchdog, heartbeat, timeout",
    r"glances?": "check",
    r"obey(s|ed)?|befalls?": "apply, stop, fail",
    r"folks?|crews?|guests?": "ranks, hosts, peers",
    r"is told (so|of|that)": "gets an error, is reported",
    r"is (its|their) own affair": "is not checked",
    r"goes on saying": "still says",
    r"revolutionary|blazing(ly)?|seamless(ly)?|effortless(ly)?|state-of-the-art": "a figure",
}
ALL = re.compile("|".join(rf"(?P<p{number}>\b(?:{phrase})\b)" for number, phrase in enumerate(PHRASES)), re.IGNORECASE)


def found_in(text: str) -> list[str]:
    """Returns `phrase: what to write` for each place outside of code; identifiers stand in back quotes."""
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", text, flags=re.DOTALL)
    advice = list(PHRASES.values())
    return [f"{hit[0]}: write {advice[int(hit.lastgroup[1:])]}" for hit in ALL.finditer(" ".join(prose.split()))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_plain(page):
    assert found_in(page.read_text(encoding="utf-8")) == []


def test_a_phrase_is_found_across_lines_but_not_in_code():
    assert found_in("this takes\nnote, and `mend` is a name\n```\nobey\n```") == ["takes note: write record, observe"]
