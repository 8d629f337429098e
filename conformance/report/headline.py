"""Headline of a report: its outcome, on what, how it was restricted, and what it says nothing about."""

from collections.abc import Iterator

import msgspec

from conformance.judge.verdicts import CONFORMANT, INCOMPLETE, NOT_CONFORMANT, SUITE_FAILED, USAGE, Verdict
from conformance.numerics.arithmetic import OWN, Arithmetic
from conformance.report.schema import Report
from conformance.report.wording import counted

_OUTCOMES = {
    CONFORMANT: "CONFORMANT",
    NOT_CONFORMANT: "NOT CONFORMANT",
    SUITE_FAILED: "THE SUITE FAILED",
    USAGE: "USAGE ERROR",
    INCOMPLETE: "INCOMPLETE",
}
_NOT_JUDGED = (Verdict.UNSUPPORTED, Verdict.NOT_RUN)


class Headline(msgspec.Struct, frozen=True):
    """Outcome of a session and its scope, which every rendering of a report shows first."""

    outcome: str
    """Meaning of the exit status: `CONFORMANT`, `NOT CONFORMANT`, `THE SUITE FAILED`, `USAGE ERROR`, `INCOMPLETE`."""
    subject: str
    """Software and hardware that were judged: `torch 2.13.0+cpu, CPU (gloo, simulated), profile smoke`."""
    restrictions: list[str]
    """Reasons why the outcome is not that of the profile: `only --cells 'tp = 2'`, `defect grads-summed injected`."""
    nothing_about: str
    """Clause about what the session cannot show: `nothing about NCCL, CUDA streams: 13 cases unsupported`, or empty."""


def headline(report: Report) -> Headline:
    """Return the headline of a report."""
    return Headline(
        outcome=_OUTCOMES.get(report.exit_code, f"ENDED WITH EXIT STATUS {report.exit_code}"),
        subject=f"torch {report.environment['packages']['torch']}, {_device(report)}, profile {report.profile}",
        restrictions=list(restrictions(report)),
        nothing_about=_nothing_about(report),
    )


def headline_line(report: Report) -> str:
    """Return outcome, restrictions and subject in one line."""
    told = headline(report)
    restricted = f" ({'; '.join(told.restrictions)})" if told.restrictions else ""
    return f"{told.outcome}{restricted}: {told.subject}"


def restrictions(report: Report) -> Iterator[str]:
    """Yield the reasons why a report does not tell the outcome of its profile on an unchanged product."""
    if report.selection:
        yield f"only {report.selection}"
    if report.defect:
        yield f"defect {report.defect} injected"
    arithmetic = msgspec.convert(report.environment.get("hardware", {}).get("arithmetic", {}), Arithmetic)
    if arithmetic != OWN:
        yield f"kernels {arithmetic.kernels}, sums {arithmetic.sums}"


def _device(report: Report) -> str:
    device = report.environment["device"]
    names = {"cpu": "CPU", "sim": device.get("name")}
    name = names.get(device.get("type")) or f"{device['count']} x {device['name']}"
    judged = sorted({case.substrate for case in report.cases if case.verdict not in _NOT_JUDGED} - {""})
    return f"{name} ({', '.join(judged)})" if judged else name


def _nothing_about(report: Report) -> str:
    number = sum(case.verdict == Verdict.UNSUPPORTED for case in report.cases)
    unsupported = f"{counted(number, 'case')} unsupported" if number else ""
    blind_to = report.environment.get("cannot_show", "")
    return ": ".join(filter(None, [f"nothing about {blind_to}" if blind_to else "", unsupported]))
