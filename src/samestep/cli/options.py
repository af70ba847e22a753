"""An argument parser whose errors are exceptions, in one line that says how to fix them."""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn

from samestep.errors import UsageError
from samestep.fake_gpus import number

__all__: list[str] = []


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, without its own exit on an error, and with a guess at a misspelt option."""

    verbatim: tuple[str, ...] = ()  # options whose values are options of another program
    numbered: tuple[str, ...] = ()  # options whose number may be left out

    def __init__(self, command: str, **options: Any) -> None:
        super().__init__(
            prog=f"samestep {command}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Returns the options, or raises UsageError where one is unknown or malformed."""
        options, unknown = self.parse_known_args(self._joined(self._with_numbers(arguments)))
        if unknown:
            raise UsageError(self._unknown(unknown[0]))
        return options

    def _joined(self, arguments: Sequence[str]) -> list[str]:
        """Writes the options of :attr:`verbatim` and their values in one word: argparse refuses values with a dash."""
        words = iter(arguments)
        return [f"{word}={next(words, '')}" if word in self.verbatim else word for word in words]

    def _with_numbers(self, arguments: Sequence[str]) -> list[str]:
        """Writes `--fake-gpus` and its number in one word: argparse would take the script for the number."""
        words = list(arguments)
        for place in [place for place, word in enumerate(words) if word in self.numbered][:1]:
            before, _ = self.parse_known_args(self._joined(words[:place]))
            if not getattr(before, "program", None):  # else it is the script's own
                number = words[place + 1 : place + 2]
                given = bool(number) and re.fullmatch(r"[+-]?\d+", number[0]) is not None
                words[place : place + 1 + given] = [f"{words[place]}={number[0] if given else ''}"]
        return words

    def without(self, arguments: Sequence[str], removed: Collection[str]) -> list[str]:
        """Returns the options in front of the program but those whose names in the parsed options are `removed`."""
        words = self._joined(self._with_numbers(arguments))
        options, _ = self.parse_known_args(words)
        rest, kept = iter(words[: len(words) - len(options.program)]), []
        for word in rest:
            name, _, _ = word.partition("=")
            action = self._option_string_actions.get(name) or self._option_string_actions.get(word[:2])  # -n4
            takes_next = action is not None and action.nargs != 0 and word in self._option_string_actions
            value = [next(rest)] if takes_next else []
            if action is None or action.dest not in removed:
                kept += [word, *value]
        return kept

    def also(self, *spellings: str, dest: str, **options: Any) -> None:
        """Accepts further spellings of an option, which the help does not list."""
        self.add_argument(*spellings, dest=dest, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)

    def error(self, message: str) -> NoReturn:
        message = re.sub(r"ignored explicit argument .*", "it takes no value", message, flags=re.DOTALL)
        raise UsageError(f"{message}; `{self.prog} --help` lists the options")

    def _unknown(self, option: str) -> str:
        name = option.partition("=")[0]
        close = difflib.get_close_matches(name, self._option_string_actions, n=1)
        hint = f"did you mean {close[0]}?" if close else f"`{self.prog} --help` lists the options"
        return f"unknown option {name}: {hint}"


def whole(what: str, least: int, besides: str = "") -> Callable[[str], int]:
    """Returns a reader of an option's whole number.

    >>> whole("number of steps", 1)("20")
    20
    """

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {what}; give {least} or more{besides}")
        return int(text)

    return read


def seconds(text: str) -> float:
    """Reads an option's time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; give 0 or more")
    return value


def some_seconds(text: str) -> float:
    """Reads an option's time in which something is to happen, and so more than none."""
    value = seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} leaves no time; give a number of seconds above 0")
    return value


def add_local_rank(parser: Parser) -> None:
    """Adds the option of scripts that were written for torch.distributed.launch."""
    parser.add_argument(
        "--pass-local-rank",
        dest="local_rank",
        action="store_const",
        const="--local-rank",
        help="pass --local-rank=K to the script (--pass-local_rank: --local_rank=K), as torch.distributed.launch does",
    )
    parser.also("--pass-local_rank", "--pass_local_rank", dest="local_rank", action="store_const", const="--local_rank")


def add_fake_gpus(parser: Parser, ranks: str) -> None:
    """Adds the option that has a script for GPUs run without them; `ranks` says how many there are by default."""
    parser.numbered = ("--fake-gpus",)
    parser.add_argument(
        "--fake-gpus",
        metavar="[N]",
        type=_fake_gpus,
        help=f"run a script for CUDA and NCCL on CPUs, as if each host had N GPUs (default: {ranks}); what a GPU "
        "refuses is refused, values are the CPU's, times and memory mean nothing",
    )


def _fake_gpus(text: str) -> int:
    try:
        return 0 if not text else number(text, "N")  # 0: one for each rank
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
