"""Wishes of single ranks, which signals and other threads bring at any moment."""

from __future__ import annotations

import sys

from samestep.runtime.step import StepState


def taken_with_a_signal_before_instruction(number):
    """What two steps in a row take of a wish to save and of one to stop that comes in the middle; None past the end."""
    state, seen = StepState(), 0
    state.listen()
    state.wish("save")

    def trace(frame, event, _):
        nonlocal seen
        frame.f_trace_opcodes = frame.f_code is StepState.take_wishes.__code__
        if event == "opcode":
            seen += 1
            if seen == number:
                sys.settrace(None)
                state.wish("stop")
        return trace if frame.f_trace_opcodes else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        taken = [state.take_wishes()]
    finally:
        sys.settrace(before)
    return [*taken, state.take_wishes()] if seen >= number else None


def agreed(taken):
    state = StepState()
    state.settle(taken)
    return state.agreed


def test_no_wish_is_lost_whenever_it_comes():
    number = 1
    while (taken := taken_with_a_signal_before_instruction(number)) is not None:
        assert agreed(taken[0]) | agreed(taken[1]) == {"save", "stop"}, f"before instruction {number}"
        number += 1
    assert number > 10
