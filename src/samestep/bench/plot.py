"""A benchmark as a picture: bandwidth against size, in a page that needs no network."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from samestep.bench.harness import Report
from samestep.errors import UsageError

__all__: list[str] = []

DRAWN = ("allreduce",)
WHOLE_PAGE = True  # plotly's own script lies in the page


def check_plot(name: str) -> None:
    """Refuses a plot before anything is measured."""
    if name not in DRAWN:
        raise UsageError(f"--plot draws {', '.join(DRAWN)}, not {name}: --json has every time of it")
    if find_spec("plotly") is None:
        raise UsageError("--plot needs plotly: pip install 'samestep[report]'")


def draw(report: Report, file: Path) -> None:
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for name, points in report.curves.items():
        figure.add_scatter(name=name, x=[nbytes for nbytes, _ in points], y=[speed for _, speed in points])
    conditions = ", ".join(f"{name} {value}".replace("_", " ") for name, value in report.setting.items())
    figure.update_layout(
        title=f"{report.bench}: {conditions}",
        xaxis={"title": "bytes of a rank's tensor", "type": "log", "exponentformat": "SI", "dtick": 1},
        yaxis={"title": "bus bandwidth, GB/s", "type": "log", "dtick": 1, "exponentformat": "none"},
        template="plotly_white",
    )
    figure.write_html(file, include_plotlyjs=WHOLE_PAGE)
