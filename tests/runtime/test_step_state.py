"""Requests of single ranks, which signal handlers and other threads make at any moment."""

from __future__ import annotations

import sys

from samestep.runtime.step_state import StepState


def taken_with_a_signal_before_instruction(number):
    """Returns what two steps take of a request to save, and of one to stop that comes in the middle; None after it."""
    state, seen = StepState(), 0
    state.enable_requests()
    state.request("save")

    def trace(frame, event, _):
        nonlocal seen
        frame.f_trace_opcodes = frame.f_code is StepState.encode_requests.__code__
        if event == "opcode":
            seen += 1
            if seen == number:
                sys.settrace(None)
                state.request("stop")
        return trace if frame.f_trace_opcodes else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        taken = [state.encode_requests()]
    finally:
        sys.settrace(before)
    return [*taken, state.encode_requests()] if seen >= number else None


def agreed(taken):
    state = StepState()
    state.apply(taken)
    return state.agreed


def test_no_request_is_lost_whenever_it_comes():
    number = 1
    while (taken := taken_with_a_signal_before_instruction(number)) is not None:
        assert agreed(taken[0]) | agreed(taken[1]) == {"save", "stop"}, f"before instruction {number}"
        number += 1
    assert number > 10
