"""What a run was given: its command line and the settings of its objects; what of it differs in a resumed run.

An optimizer takes its learning rate from the saved state, whatever the script gives it. So a resume says what was given
otherwise than in the run that saved, and which of both counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep._version import __version__
from samestep.checkpoints.manifest import Manifest
from samestep.checkpoints.state import uncompiled
from samestep.text import escape_control

MASK = "***"
_SECRET = re.compile(r"key|token|secret|password|passwd|credential", re.IGNORECASE)
_MOST_WORDS, _LONGEST_WORD = 1_000, 1_000
_MOST_MODULES = 2_000
_MOST_PHRASES = 8


@dataclass(frozen=True)
class Resume:
    """The checkpoint from which a run was resumed.

    Attributes:
        path: its folder.
        step: optimizer steps that were finished.
        epoch: epochs that were finished.
        differences: what the run was given otherwise than the one that saved, a phrase each.
    """

    path: Path
    step: int
    epoch: int
    differences: tuple[str, ...] = ()


def command_line(words: Sequence[str]) -> list[str]:
    """Returns a command line without the values of options that name a secret.

    >>> command_line(["train.py", "--api-key", "abc", "--token=abc", "--lr", "0.1"])
    ['train.py', '--api-key', '***', '--token=***', '--lr', '0.1']
    """
    shown = []
    for number, word in enumerate(words[:_MOST_WORDS]):
        before = words[number - 1] if number else ""
        name, equals, _ = word.partition("=")
        if equals and _SECRET.search(name):
            word = f"{name}={MASK}"
        elif before.startswith("-") and "=" not in before and _SECRET.search(before) and not word.startswith("--"):
            word = MASK
        shown.append(word[:_LONGEST_WORD])
    return shown


def settings_of(named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the settings of each named object as the script gave them: plain values by name."""
    found = {name: dict(_settings(thing)) for name, thing in named.items()}
    return {name: settings for name, settings in found.items() if settings}


def _settings(thing: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, Optimizer):
        for number, group in enumerate(thing.param_groups):
            given = {**group, "lr": group.get("initial_lr", group.get("lr"))}  # a schedule may have changed it
            for key, value in given.items():
                if key not in {"params", "initial_lr", "param_names"} and (plain := _plain(value)) is not None:
                    if number == 0:
                        yield key, plain
                    elif plain != _plain(thing.param_groups[0].get(key)):
                        yield f"group {number} {key}", plain
    elif isinstance(thing, nn.Module):
        for count, (name, part) in enumerate(thing.named_modules()):
            if count < _MOST_MODULES and (settings := part.extra_repr()) and not list(part.children()):
                bare = uncompiled(name).removeprefix("module.")
                yield bare or "itself", f"{type(part).__name__}({settings[:_LONGEST_WORD]})"
    elif isinstance(thing, LRScheduler):
        for key, value in vars(thing).items():
            if (
                not key.startswith("_")
                and key not in {"last_epoch", "base_lrs"}
                and (plain := _plain(value)) is not None
            ):
                yield key, plain
    elif isinstance(size := getattr(thing, "batch_size", None), int):
        yield "batch_size", size


def _plain(value: Any) -> Any:
    """A value as JSON has it; None for what is no plain value, or not set."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    if (
        isinstance(value, list | tuple)
        and len(value) < 10
        and all(isinstance(one, int | float) and math.isfinite(one) for one in value)
    ):
        return [float(one) if isinstance(one, float) else int(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, bool | int | float | str) else None


def differences(
    manifest: Manifest,
    command: Sequence[str],
    given: Mapping[str, Mapping[str, Any]],
    loaded: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """Returns what a run was given otherwise than the one that saved, a phrase each.

    `given` are the settings of its objects before they loaded their state, `loaded` those after it.
    """
    before, now_given = _options(manifest.command), _options(command)
    names = [*now_given, *(name for name in before if name not in now_given)]
    options = {
        name: (before.get(name), now_given.get(name)) for name in names if before.get(name) != now_given.get(name)
    }
    phrases = []
    for name, settings in given.items():
        saved, now = manifest.settings.get(name, {}), loaded.get(name, {})
        for key in (key for key in settings if settings[key] != saved.get(key, settings[key])):
            spellings = (f"--{key.replace('_', '-')}", f"--{key}")
            option = next((one for one in spellings if one in now_given), None)
            for one in spellings:
                options.pop(one, None)
            if now.get(key) != settings[key]:
                what = f"{option} {_text(settings[key])}" if option else f"{name} {key}={_text(settings[key])}"
                phrases.append(f"{what} given, the saved {name} state has {_text(now.get(key))} and wins")
            elif key == "batch_size":
                of = "" if name == "data" else f" of {name}"
                phrases.append(f"batch size{of} {settings[key]} was {saved[key]}")
            else:
                phrases.append(f"{name}.{key} {_text(settings[key])} was {_text(saved[key])}")
    phrases += [_option_text(option, was, now) for option, (was, now) in options.items()]
    for what, was, version in (
        ("samestep", manifest.samestep, __version__),
        ("torch", manifest.torch, torch.__version__),
    ):
        if was != str(version):
            phrases.append(f"{what} {version} was {was}")
    more = len(phrases) - _MOST_PHRASES
    phrases = phrases if more <= 0 else [*phrases[:_MOST_PHRASES], f"and {more} more differences"]
    return [escape_control(phrase) for phrase in phrases]  # the checkpoint may be a stranger's


def effective(
    manifest: Manifest, given: Mapping[str, Mapping[str, Any]], loaded: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Returns the settings of a resumed run: what the saved state has overridden is as the run that saved was given it.

    So the next resume says again that a learning rate which is given counts for nothing.
    """
    return {
        name: {
            key: value if loaded.get(name, {}).get(key) == value else manifest.settings.get(name, {}).get(key, value)
            for key, value in settings.items()
        }
        for name, settings in given.items()
    }


def _option_text(option: str, was: str | None, now: str | None) -> str:
    if now is None:
        return f"{option} {was} is not given now".replace("  ", " ")
    if was is None:
        return f"{option} {now} was not given before".replace("  ", " ")
    return f"{option} {now} was {was}"


def _options(words: Sequence[str]) -> dict[str, str]:
    """The options of a command line with their values, "" for a flag; positional words by their number."""
    found: dict[str, str] = {}
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or re.fullmatch(r"-?[\d.]+(e-?\d+)?", word):
            found[f"argument {len(found) + 1}"] = word
            continue
        name, equals, value = word.partition("=")
        while not equals and rest and (not rest[0].startswith("-") or re.fullmatch(r"-[\d.]+(e-?\d+)?", rest[0])):
            value = f"{value} {rest.pop(0)}".strip()
        found[name] = value
    return found


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
