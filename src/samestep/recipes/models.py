"""Networks by name: ResNet-18 to 152 in this file, then torchvision's and timm's, where those can be imported.

Both libraries have compiled parts that must match the installed torch, so an import may fail in more ways than
ImportError; the error for an unknown name says what went wrong with each. The ResNets are those of He et al., "Deep
Residual Learning for Image Recognition" (arXiv:1512.03385), with two customary changes:

- a bottleneck halves the resolution in its 3x3 convolution, not in the first 1x1 ("v1.5"), which loses less of
  the image;
- `zero_init` starts every residual branch at zero (Goyal et al., arXiv:1706.02677), so that each block begins as
  the identity and large batches train from the first step.

Parameter names follow the tables everybody publishes weights in (`layer1.0.conv1.weight`, `fc.bias`).

    image  B x 3 x 224 x 224
    stem   B x 64 x 56 x 56                         7x7 convolution, stride 2; 3x3 maximum, stride 2
    layer1 B x  64e x 56 x 56     layer2 B x 128e x 28 x 28       e = 1 for basic blocks, 4 for bottlenecks
    layer3 B x 256e x 14 x 14     layer4 B x 512e x  7 x  7
    fc     B x classes                              after the mean over all positions
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import ClassVar

import torch
from torch import nn

import samestep

__all__ = ["RESNETS", "ResNet", "architecture", "resnet"]


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution that keeps the resolution at stride 1; no bias, because BatchNorm follows."""
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """A residual block: `relu(branch(x) + shortcut(x))`. The branch is what the two kinds differ in."""

    expansion: ClassVar[int]
    last_norm: ClassVar[str]  # the BatchNorm that ends the branch; its weight scales the whole residual

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def shortcut(self, x: torch.Tensor) -> torch.Tensor:
        """What the branch is added to."""
        return x if self.downsample is None else self.downsample(x)


class BasicBlock(Block):
    """Two 3x3 convolutions: ResNet-18 and 34."""

    expansion, last_norm = 1, "bn2"

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        self.conv1, self.bn1 = convolution(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.bn2(self.conv2(branch))
        return self.relu(branch + self.shortcut(x))  # type: ignore[no-any-return]


class Bottleneck(Block):
    """1x1 down to a quarter, 3x3, 1x1 up again: ResNet-50, 101 and 152."""

    expansion, last_norm = 4, "bn3"

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        outputs = width * self.expansion
        self.conv1, self.bn1 = convolution(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = convolution(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = convolution(width, outputs, 1), nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        branch = self.relu(self.bn1(self.conv1(x)))
        branch = self.relu(self.bn2(self.conv2(branch)))
        branch = self.bn3(self.conv3(branch))
        return self.relu(branch + self.shortcut(x))  # type: ignore[no-any-return]


class ResNet(nn.Module):
    """Images `B x 3 x H x W` to class scores `B x classes`; B may be 0."""

    def __init__(
        self, block: type[Block], depths: tuple[int, int, int, int], *, classes: int = 1000, zero_init: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = stage(block, 64, 64, depths[0], stride=1)
        self.layer2 = stage(block, 64 * block.expansion, 128, depths[1], stride=2)
        self.layer3 = stage(block, 128 * block.expansion, 256, depths[2], stride=2)
        self.layer4 = stage(block, 256 * block.expansion, 512, depths[3], stride=2)
        self.fc = nn.Linear(512 * block.expansion, classes)
        initialise(self, zero_init=zero_init)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores, not yet probabilities."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean(dim=(2, 3)))  # type: ignore[no-any-return]


def stage(block: type[Block], inputs: int, width: int, depth: int, *, stride: int) -> nn.Sequential:
    """`depth` blocks at one resolution; the first one changes it."""
    first = block(inputs, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, 1) for _ in range(depth - 1)))


def initialise(model: nn.Module, *, zero_init: bool) -> None:
    """He et al., arXiv:1502.01852, for the convolutions; BatchNorm is born as the identity."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Block) and zero_init:
            nn.init.zeros_(module.get_parameter(f"{module.last_norm}.weight"))


RESNETS: dict[str, tuple[type[Block], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


def resnet(name: str, *, classes: int = 1000, zero_init: bool = False) -> ResNet:
    """The network called `name` in :data:`RESNETS`, freshly initialised.

    >>> sum(p.numel() for p in resnet("resnet18").parameters())
    11689512
    """
    block, depths = RESNETS[name]
    return ResNet(block, depths, classes=classes, zero_init=zero_init)


def architecture(name: str, *, classes: int, zero_init: bool = False) -> nn.Module:
    """The network called `name`, freshly initialised, with `classes` outputs.

    Args:
        name: such as "resnet50", "vit_b_16" (torchvision) or "convnext_tiny" (timm).
        classes: number of outputs.
        zero_init: start residual branches at zero; for this package's ResNets.

    Raises:
        samestep.UsageError: nobody knows the name; lists what there is.
    """
    if name in RESNETS:
        return resnet(name, classes=classes, zero_init=zero_init)
    known, missing = list(RESNETS), []
    for library, catalogue in CATALOGUES.items():
        try:
            names, make = catalogue(library)
        except (ImportError, RuntimeError, OSError) as error:
            missing.append(f"{library} ({(str(error).strip() or type(error).__name__).splitlines()[0]})")
            continue
        if name in names:
            return make(name, classes)
        known += names
    raise samestep.UsageError(unknown(name, known, missing))


def torchvision_models(library: str) -> tuple[list[str], Callable[[str, int], nn.Module]]:
    models: ModuleType = import_module(f"{library}.models")
    return models.list_models(module=models), lambda name, classes: models.get_model(name, num_classes=classes)


def timm_models(library: str) -> tuple[list[str], Callable[[str, int], nn.Module]]:
    timm = import_module(library)
    return timm.list_models(), lambda name, classes: timm.create_model(name, num_classes=classes)


Catalogue = Callable[[str], tuple[list[str], Callable[[str, int], nn.Module]]]
CATALOGUES: dict[str, Catalogue] = {"torchvision": torchvision_models, "timm": timm_models}


def unknown(name: str, known: list[str], missing: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean {close[0]!r}?" if close else ":"
    more = f" and {len(known) - len(RESNETS)} more" if len(known) > len(RESNETS) else ""
    absent = f"; not importable here: {', '.join(missing)}" if missing else ""
    return f"unknown architecture {name!r}{hint} there are {', '.join(RESNETS)}{more}{absent}"
