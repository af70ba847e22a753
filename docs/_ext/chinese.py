"""Pages below `zh/` say that they are Chinese: screen readers and fonts go by it."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension."""
    app.connect("html-page-context", _tell_language)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _tell_language(_app: Sphinx, page: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    if page.startswith("zh/"):
        context["language"] = "zh-Hans"
