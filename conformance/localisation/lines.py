"""Lines of the trainer that compute or call what is wrong, as near as taps can tell."""

import math

import torch

from conformance.localisation.equality import CLOSE, multiple
from conformance.localisation.traces import Trace
from conformance.localisation.walk import Compared, ComparedStep
from conformance.report.location import Code, Stage


def line_of(step: ComparedStep, first: Compared, stage: Stage, name: str) -> Code | None:
    """Return the line of a first wrong tensor, which is named as one of a module or a parameter."""
    trace, tap = step.traces[first.rank], first.tap
    if stage == "loss":
        return _line_of_loss(step, first)
    if tap.kind in ("parameter", "parameter in backward"):
        return _line_of_stale_parameter(trace, first) or trace.code(tap.called)
    own = trace.own_lines.get(f"{step.step} {tap.module}", [])
    if tap.kind in ("output", "parameter gradient") and own:
        return trace.code(own[-1])
    if tap.kind == "input" and tap.computed >= 0 and not tap.is_recomputed:
        return trace.code(tap.computed)
    own = trace.own_lines.get(f"{step.step} {name}", [])
    if stage == "backward" and own and _is_input_of(step, first, name):
        return trace.code(own[0])
    return trace.code(_called(trace, first, name))


def _is_input_of(step: ComparedStep, first: Compared, name: str) -> bool:
    """Return whether a gradient is that of an input of a module, and not only of modules inside of it."""
    oracle = step.oracle(first.rank)
    known = oracle.taps[oracle.index[(*first.tap.place[:-1], False)]]
    return name in [user.module for user in oracle.consumers.get(known.value, ())]


def _called(trace: Trace, first: Compared, name: str) -> int:
    """Return the line that called a module last before the wrong tensor."""
    for tap in reversed(trace.taps[: first.index + 1]):
        if tap.module == name and tap.step == first.tap.step:
            return tap.called
    return first.tap.called


def _line_of_loss(step: ComparedStep, first: Compared) -> Code | None:
    """Return the line that computed the number with which backward began, if numbers tell it, or the last number.

    If the wrong gradient is a multiple of the expected one, then so is the scaled loss.
    """
    trace = step.traces[first.rank]
    ratio = None if first.expected is None else multiple(first.measured, first.expected)
    loss = _expected_loss(step, first)
    if ratio is not None and loss is not None:
        for phase in ("forward", "backward"):
            for number in trace.numbers.get(f"{step.step} {phase}", ()):
                if math.isclose(number.value, ratio * loss, rel_tol=CLOSE):
                    return trace.code(number.line)
    lines = trace.scalars.get(f"{step.step} backward") or trace.scalars.get(f"{step.step} forward") or []
    return trace.code(lines[-1]) if lines else None


def _expected_loss(step: ComparedStep, first: Compared) -> float | None:
    """Return the loss with which the backward of the oracle began, if it is known."""
    oracle = step.oracle(first.rank)
    numbers = oracle.numbers.get(f"{step.step} backward", ())
    return numbers[min(first.tap.call, len(numbers) - 1)].value if numbers else None


def _line_of_stale_parameter(trace: Trace, first: Compared) -> Code | None:
    """Return the line of the last call of the model outside of a step's forward and backward, as of an evaluation.

    None if the parameter does not have the value of the step before.
    """
    earlier = trace.tensor((first.tap.step - 1, *first.tap.place[1:]))
    calls = [call.line for call in trace.other_calls if 0 <= call.step < first.tap.step]
    is_stale = earlier is not None and torch.equal(earlier, first.measured)
    return trace.code(calls[-1]) if is_stale and calls else None
