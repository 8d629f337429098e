"""Headline of a report: outcome, what was judged, restrictions, and what nothing was said about."""

import msgspec
import pytest

from conformance.report.headline import headline, headline_line
from conformance.report.schema import Report
from tests.support.sample_reports import case, report

CPU = {
    "packages": {"torch": "2.13.0+cpu"},
    "device": {"type": "cpu", "name": "Fake", "count": 2},
    "cannot_show": "NCCL, CUDA streams",
}


def session(**fields: object) -> Report:
    simulated = msgspec.structs.replace(case("MEM-1/a"), substrate="simulated")
    unsupported = msgspec.structs.replace(case("STREAM-2/a", "unsupported"), substrate="nccl")
    of_cpu = report(case("PAR-1/a"), simulated, unsupported)
    return msgspec.structs.replace(of_cpu, **{"environment": CPU, **fields})


@pytest.mark.parametrize(
    ("exit_code", "outcome"),
    [
        (0, "CONFORMANT"),
        (1, "NOT CONFORMANT"),
        (3, "THE SUITE FAILED"),
        (4, "USAGE ERROR"),
        (5, "INCOMPLETE"),
        (130, "ENDED WITH EXIT STATUS 130"),
    ],
)
def test_the_outcome_comes_first(exit_code: int, outcome: str) -> None:
    shown = session(exit_code=exit_code)
    assert headline(shown).outcome == outcome
    assert headline_line(shown).startswith(f"{outcome}: torch 2.13.0+cpu, CPU (gloo, simulated), profile pr")


def test_what_was_judged_names_the_substrates_of_judged_cases_alone() -> None:
    assert headline(session()).subject == "torch 2.13.0+cpu, CPU (gloo, simulated), profile pr"
    assert headline(report()).subject == "torch 2.13.0, 2 x Fake, profile pr"


def test_a_narrowed_session_with_a_defect_says_so_in_the_first_line() -> None:
    shown = session(selection="--cells 'tp = 2'", defect="grads-summed", exit_code=1)
    assert headline(shown).restrictions == ["only --cells 'tp = 2'", "defect grads-summed injected"]
    assert headline_line(shown) == (
        "NOT CONFORMANT (only --cells 'tp = 2'; defect grads-summed injected): "
        "torch 2.13.0+cpu, CPU (gloo, simulated), profile pr"
    )
    assert headline(session()).restrictions == []


def test_what_a_session_says_nothing_about() -> None:
    assert headline(session()).nothing_about == "nothing about NCCL, CUDA streams: 1 case unsupported"
    assert headline(session(cases=[])).nothing_about == "nothing about NCCL, CUDA streams"
    assert headline(report(case("STREAM-2/a", "unsupported"))).nothing_about == "1 case unsupported"
    assert headline(report(case("PAR-1/a"))).nothing_about == ""
