"""What one process's training is, in plain numbers: measured once, and planned with on any cluster.

    step    │ data │ forward │ backward          │ optimizer │ other │
                               ▲ ▲  ▲   ▲    ▲ ▲                          gradients, each ready at its time

A profile is a file of JSON, so that a training measured where it can run is planned where it cannot, or once and never
again. Its version is that of the layout: a later samestep reads earlier ones, and refuses what it cannot know.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from samestep.errors import UsageError
from samestep.files import write_atomic
from samestep.pipelines.layers import Layer

__all__: list[str] = []

VERSION = 1


@dataclass(frozen=True)
class Gradient:
    """A parameter's gradient.

    Attributes:
        name: of the parameter in the model.
        nbytes: of the gradient.
        ready_s: from the start of the backward.
    """

    name: str
    nbytes: int
    ready_s: float


@dataclass(frozen=True)
class Size:
    """What the whole model takes for a batch of some size.

    Attributes:
        samples: of the batch.
        forward_s: seconds of the forward.
        backward_s: seconds of the backward.
    """

    samples: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one process's training is.

    Attributes:
        script: that was measured.
        machine: on which, in words.
        torch: its version.
        batch: samples of a step.
        steps: that were measured.
        data_s: seconds a step waits for samples; these and the following are medians.
        forward_s: seconds of the forward.
        backward_s: seconds of the backward.
        optimizer_s: seconds of the update.
        other_s: seconds of all else.
        step_low_s: what the quicker quarter of the steps took.
        step_high_s: what the slower quarter took.
        gradients: in the order in which they are ready.
        parameter_bytes: of the model.
        buffer_bytes: likewise.
        optimizer_bytes: what the optimizer remembers.
        activation_bytes: kept from forward to backward, for `batch` samples; where a step has micro-batches, for one.
        sizes: forward and backward of batches of several sizes; empty where only the step itself is known.
        layers: what they cost, by samples of a micro-batch; empty where the model cannot be cut.
        uncut: why there are no layers; None where there are.
        per_rank: the batch is that of each rank: the script deals its data out by torch's DistributedSampler.

    Raises:
        UsageError: a negative or endless number, a batch of none or one given twice, no gradients, a step of no time,
            or unlike numbers of layers.
    """

    script: str
    machine: str
    torch: str
    batch: int
    steps: int
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    other_s: float
    step_low_s: float
    step_high_s: float
    gradients: tuple[Gradient, ...]
    parameter_bytes: int
    buffer_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    sizes: tuple[Size, ...] = ()
    layers: Mapping[int, tuple[Layer, ...]] = field(default_factory=dict)
    uncut: str | None = None
    per_rank: bool = False

    def __post_init__(self) -> None:
        _check_numbers(self, "")
        for gradient in self.gradients:
            _check_numbers(gradient, f"gradient {gradient.name}: ")
        for size in self.sizes:
            _check_numbers(size, f"a batch of {size.samples}: ")
        for layer in (each for some in self.layers.values() for each in some):
            _check_numbers(layer, f"layer {layer.name}: ")
        if self.batch < 1 or self.steps < 1:
            raise UsageError(f"a profile of {self.steps} steps of {self.batch} samples: both must be 1 or more")
        if not self.step_s:
            raise UsageError("a profile of a step that takes no time: measure it again")
        if not self.gradients:
            raise UsageError("a profile without gradients: nothing was trained")
        samples = [size.samples for size in self.sizes]
        if 0 in samples or len(set(samples)) < len(samples):  # between equal sizes there is no line
            raise UsageError(f"a profile with sizes of {samples} samples: each must be 1 or more, and there once")
        counts = {len(each) for each in self.layers.values()}
        if len(counts) > 1 or 0 in counts:
            raise UsageError("the profile has other layers for each size of a micro-batch, or none: measure it again")

    @property
    def step_s(self) -> float:
        """What a step takes."""
        return self.data_s + self.forward_s + self.backward_s + self.optimizer_s + self.other_s

    @property
    def gradient_bytes(self) -> int:
        """Of all gradients; frozen parameters have none."""
        return sum(one.nbytes for one in self.gradients)

    def save(self, path: str | Path) -> None:
        """Writes the profile, whole or not at all."""
        write_atomic(Path(path), [json.dumps({"v": VERSION, **asdict(self)}, indent=1), "\n"])


def load(path: str | Path) -> Profile:
    """Returns a profile that was saved.

    Raises:
        UsageError: there is no such file, or it is no profile that can be read here; says which field is wrong.

    Example:
        >>> load("nowhere.json")
        Traceback (most recent call last):
        samestep.errors.UsageError: nowhere.json: no such file: samestep plan --save-profile makes one
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file: samestep plan --save-profile makes one") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path} cannot be read: it is no text") from None
    try:
        return parse(json.loads(text))
    except json.JSONDecodeError as error:
        raise UsageError(f"{path}, line {error.lineno}: no JSON, or cut off: {error.msg.lower()}") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except (RecursionError, ValueError):  # json's own limits: of digits, and of lists in lists
        raise UsageError(f"{path}: no profile: its numbers are too long, or its lists too deep") from None


def parse(given: Any) -> Profile:
    """Returns the profile of a JSON object.

    Raises:
        UsageError: another version, a missing or unknown field, a field of another type or a number that cannot be.
    """
    if not isinstance(given, dict):
        raise UsageError("no profile: an object is expected")
    if given.get("v") != VERSION:
        raise UsageError(f"a profile of version {given.get('v')}, and this samestep reads {VERSION}: measure it again")
    rest = {key: value for key, value in given.items() if key != "v"}
    for key, kind in (("gradients", Gradient), ("sizes", Size)):
        rest[key] = tuple(_made(kind, each, key) for each in _list(rest.get(key, []), key))
    layers = rest.get("layers", {})
    if not isinstance(layers, dict):
        raise UsageError("layers: an object of lists is expected")
    rest["layers"] = {
        _samples(size): tuple(_made(Layer, each, "layers") for each in _list(some, "layers"))
        for size, some in layers.items()
    }
    made: Profile = _made(Profile, rest, "the profile")
    return made


def _made(kind: Any, given: Any, where: str) -> Any:
    """A dataclass of an object with its fields, all that have no default."""
    if not isinstance(given, dict):
        raise UsageError(f"{where}: an object is expected, and it is {given!r:.40}")
    known = {one.name: one for one in fields(kind)}
    for key in given:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise UsageError(
                f"{where} has a field {key!r}{f': did you mean {close[0]!r}?' if close else ', unknown here'}"
            )
    for name, one in known.items():
        if name not in given and one.default is MISSING and one.default_factory is MISSING:
            raise UsageError(f"{where} lacks the field {name!r}")
        if name in given and not _fits(str(one.type), given[name]):
            raise UsageError(f"{where}: {name} is {given[name]!r:.40}, and should be {_WORDS[str(one.type)]}")
    return kind(**given)


_DIGITS = 18  # of a number of samples
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "str | None": "a text or null",
    "bool": "true or false",
}


def _fits(wanted: str, value: Any) -> bool:
    if wanted not in _WORDS:
        return True
    if wanted.startswith("str"):
        return isinstance(value, str) or (value is None and wanted != "str")
    if wanted == "bool":
        return isinstance(value, bool)
    return isinstance(value, int if wanted == "int" else (int, float)) and not isinstance(value, bool)


def _list(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise UsageError(f"{where}: a list is expected, and it is {given!r:.40}")
    return given


def _samples(text: str) -> int:
    if not text.isdecimal() or len(text) > _DIGITS or not int(text):
        raise UsageError(f"layers of micro-batches of {text!r:.40} samples: a whole number above 0 is expected")
    return int(text)


_LARGEST = 1e30  # bytes, operations or seconds: sums and products of a few such are finite


def _check_numbers(one: Any, where: str) -> None:
    for each in fields(one):
        value = getattr(one, each.name)
        if isinstance(value, (int, float)) and not 0 <= value <= _LARGEST:
            raise UsageError(f"{where}{each.name} is {value!r:.40}: a profile has numbers of 0 to {_LARGEST:.0e}")
