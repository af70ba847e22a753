"""A run as one page of HTML: it opens without a network, asks for nothing, and obeys nobody's text.

template   every text is escaped, and without control characters
charts     their data is JSON in an element that no browser executes, without < > & and line separators
scripts    two, named by their digests in the page's security policy: no other one runs, whatever a run is called
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from samestep.errors import UsageError
from samestep.reporting import content
from samestep.reporting.analysis import RunAnalysis
from samestep.reporting.status import program
from samestep.reporting.summary import Summary
from samestep.text import escape_lines, format_percent

_ESCAPES = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def check_library() -> None:
    """Refuses a page before anything is read.

    Raises:
        UsageError: plotly, which draws the charts, is not installed.
    """
    if find_spec("plotly") is None:
        raise UsageError("a report needs plotly: pip install 'samestep[report]'")


def render_page(analysis: RunAnalysis, summary: Summary) -> str:
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    def plain(value: Any) -> Any:
        return escape_lines(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    environment = Environment(autoescape=True, finalize=plain, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"code": _with_code, "share": format_percent}
    library, code = get_plotlyjs(), _asset("page.js")
    return environment.from_string(_asset("page.html")).render(
        **_shown(analysis, summary),
        policy=_policy(library, code),
        style=_trusted(_asset("page.css")),
        data=_trusted(embedded(content.charts(analysis))),
        library=_trusted(packed(library)),
        code=_trusted(code),
    )


def packed(text: str) -> str:
    """Returns a script as a page carries it: compressed, in base 85 without "<"; page.js unpacks it.

    The library alone would be 4.8 MB of a page; so it is 1.8.
    """
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode("ascii").replace("<", ",")


def embedded(data: Any) -> str:
    r"""Returns data as JSON that may stand in a page.

    >>> embedded({"a": "</script>"})
    '{"a":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.translate(_ESCAPES)


def _shown(analysis: RunAnalysis, summary: Summary) -> dict[str, Any]:
    return {
        "title": program(analysis.run.about),
        "analysis": analysis,
        "told": summary,
        "parts": content.parts(analysis),
        "undrawn": content.undrawn(analysis),
        "ranks": content.ranks(analysis),
        "shares": content.shares(analysis),
        "ledger": content.ledger_words(analysis),
        "calls": content.calls(analysis),
        "saves": content.saves(analysis),
        "findings": content.findings(analysis),
        "said": content.said(analysis),
        "machines": content.machines(analysis),
        "facts": list(content.facts(analysis)),
        "most": content.MOST_ROWS,
        "on_gpu": any(log.machine.get("device") not in ("cpu", None) for log in analysis.logs),
    }


def _policy(*scripts: str) -> str:
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    rest = "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; {rest}"


def _with_code(text: str) -> Any:
    """A sentence in which `what stands between backquotes` is set as code."""
    from markupsafe import escape

    return _trusted(re.sub("`([^`]*)`", r"<code>\1</code>", str(escape(escape_lines(text)))))


def _trusted(text: str) -> Any:
    """Our own text, or one that is escaped already."""
    from markupsafe import Markup

    return Markup(text)  # noqa: S704


def _asset(name: str) -> str:
    return files("samestep.reporting").joinpath("assets", name).read_text(encoding="utf-8")
