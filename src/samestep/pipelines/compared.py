"""One step in several ways, for one picture: on one device, with copies that ranks wait for, and with copies beside.

one device           F0 F1 B0 B1 …
one stream           F0 · F1 ·          a copy is one more piece of work on both ranks
two streams          F0 F1              it travels while they work on
                        ·  ·
"""

from __future__ import annotations

from dataclasses import replace

from samestep.schedule.fill_drain import fill_drain
from samestep.schedule.plan import Schedule
from samestep.schedule.simulate import Costs, Timeline, simulate

__all__: list[str] = []


def ways(plan: Schedule, costs: Costs) -> dict[str, Timeline]:
    """Returns title -> the step on one device, and under fill and drain with one stream, and two.

    Where ranks have several stages, the last two are under the plan itself.

    Args:
        plan: of the step.
        costs: of its stages.

    Example:
        >>> costs = Costs.even(2, forward=1, backward=2, message=0.5)
        >>> {name: each.seconds for name, each in ways(fill_drain(2, 4), costs).items()}
        {'one device': 24.0, '2 devices, one stream': 19.0, '2 devices, two streams': 16.0}
    """
    alone = Costs([sum(costs.forward)], [sum(costs.inputs)], [sum(costs.weights)])
    ordered = fill_drain(plan.ranks, plan.micro_batches) if plan.stages == plan.ranks else plan
    found = {"one device": simulate(fill_drain(1, plan.micro_batches), alone)}
    for streams, beside in (("one stream", False), ("two streams", True)):
        found[f"{plan.ranks} devices, {streams}"] = simulate(ordered, replace(costs, beside=beside))
    return found
