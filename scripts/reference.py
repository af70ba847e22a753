"""Writes docs/reference.md: tables of the public names, and directives that show their docstrings on the site.

A table's sentence is the first line of a docstring. `--check` only compares.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path

from generated import written

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reference.md"
BEGIN = """# The Python API

<!-- written by scripts/reference.py; `make readme` brings it up to date -->

What a script may use after `import samestep`. Everything else is internal and may change. The tables link each name to
its source. On the site the full docstrings follow each table; elsewhere `python -c "import samestep;
help(samestep.shards)"` prints them. Errors: [codes and errors](codes.md#errors). Options of the commands:
[the command line](commands.md).

Where a description says *Collective*, all ranks must call the function, in the same order.
"""
CLASS = ":members:"
SECTIONS: tuple[tuple[str, str, dict[str, str]], ...] = (  # heading, text, name -> options of its directive
    (
        "Joining the ranks",
        "",
        {
            "world": "",
            "World": ":members: slices, is_first, group, barrier, generator, pace, log, close",
            "Axis": CLASS,
        },
    ),
    (
        "Training",
        "",
        {
            "replicate": "",
            "Replica": CLASS,
            "shards": "",
            "Shards": CLASS,
            "clip_grad_norm_": "",
            "DriftGuard": CLASS,
        },
    ),
    ("Over a run", "", {"evaluate": "", "checkpoint": "", "Checkpoint": CLASS}),
    ("Pipelines", "", {"plan_pipeline": "", "PipelinePlan": CLASS, "pipeline": "", "Pipeline": CLASS}),
    ("Proof", "", {"verify": "", "Report": ":members: errors, verdict, undecided, require_same, as_json"}),
    ("Processes", "", {"spawn": "", "once": ""}),
    ("Errors", "", {"SamestepError": "", "UsageError": "", "RankFailure": "", "__version__": ":no-value:"}),
    ("samestep.testing", "Ranks for your own tests.", {"testing": ":members:\n   :member-order: bysource"}),
    (
        "samestep.compress",
        "Codecs for gradients: [compression](compression.md).",
        {
            "compress": ":members: named",
            "compress.Codec": CLASS,
            **{f"compress.{name}": "" for name in ("Float16", "BFloat16", "Int8", "Sign", "TopK", "PowerSGD")},
        },
    ),
    (
        "samestep.collectives",
        "Algorithms as plans of integers, which can be proved, priced, simulated and run: [all-reduce](all-reduce.md).",
        {"collectives": "", "collectives.plan.Plan": CLASS, "collectives.plan.Transfer": CLASS},
    ),
    (
        "Algorithms",
        "",
        {
            "collectives.ring": ":members: all_reduce, reduce_scatter, all_gather",
            "collectives.segmented": ":members: all_reduce, reduce_scatter, all_gather, broadcast, reduce",
            "collectives.doubling": ":members: all_reduce",
            "collectives.halving": ":members: all_reduce, reduce_scatter, all_gather",
            "collectives.tree": ":members: broadcast, reduce, all_reduce",
            "collectives.double_tree": ":members: broadcast, reduce, all_reduce",
            "collectives.server": ":members: all_reduce, reduce_scatter, all_gather, broadcast, reduce",
            "collectives.hierarchical": ":members: all_reduce, broadcast",
            "collectives.torus": ":members: all_reduce, reduce_scatter, all_gather",
        },
    ),
    (
        "What is done with a plan",
        "",
        {
            "collectives.proof.prove": "",
            "collectives.simulate.run": "",
            "collectives.engine.run": "",
            "collectives.point_to_point.PointToPoint": CLASS,
            "collectives.choose.choose": "",
            "collectives.measure.measure": "",
        },
    ),
)
BELOW = {"Algorithms", "What is done with a plan"}  # sections of samestep.collectives


def main() -> int:
    """Returns 0 where the page is what it should be, or is by now."""
    return written(PAGE, page(), "scripts/reference.py")


def page() -> str:
    """Returns the page."""
    parts = [BEGIN]
    for heading, text, names in SECTIONS:
        parts.append(f"\n{'###' if heading in BELOW else '##'} {heading}\n")
        if text:
            parts.append(f"\n{text}\n")
        parts += ["\n| name | what it is |\n|---|---|\n", *map(row, names)]
        if heading == "Algorithms":
            for name, options in names.items():
                parts += [f"\n#### {name.rpartition('.')[2]}\n", directives({name: options})]
        else:
            parts.append(directives(names))
    return "".join(parts)


def found(name: str) -> object:
    """Returns what a dotted name below samestep stands for."""
    try:
        return importlib.import_module(f"samestep.{name}")
    except ImportError:
        module, _, attribute = f"samestep.{name}".rpartition(".")
        return getattr(importlib.import_module(module), attribute)


def row(name: str) -> str:
    """Returns the row of a name: what it is, and where."""
    thing = found(name)
    if isinstance(thing, str):
        return f"| [`samestep.{name}`](../src/samestep/_version.py) | The version of samestep. |\n"
    file = Path(inspect.getsourcefile(inspect.unwrap(thing)) or "").relative_to(ROOT)
    first = " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split())
    first = re.sub(r":\w+:`|``", "`", first).replace("|", "\\|")
    return f"| [`samestep.{name}`](../{file}) | {first} |\n"


def directives(names: dict[str, str]) -> str:
    """Returns the block that shows docstrings on the site."""
    blocks = []
    for name, options in names.items():
        block = f".. auto{kind(found(name))}:: samestep.{name}\n"
        blocks.append(block + f"   {options}\n" * bool(options))
    first = ".. currentmodule:: samestep\n\n" if "world" in names else ""
    return "\n```{eval-rst}\n" + first + "\n".join(blocks) + "```\n"


def kind(thing: object) -> str:
    """Returns what autodoc calls it."""
    if inspect.ismodule(thing):
        return "module"
    if inspect.isclass(thing):
        return "exception" if issubclass(thing, BaseException) else "class"
    return "function" if callable(thing) else "data"


if __name__ == "__main__":
    sys.exit(main())
