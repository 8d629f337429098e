"""Search for first wrong places: one for each cause, within its time, and errors that end one search alone."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.judge.judge import Judged
from conformance.judge.verdicts import Verdict
from conformance.plan.matrix import Case
from conformance.pytest_plugin import locating
from conformance.pytest_plugin.locating import Located, Locator, Symptoms
from conformance.report.explain import explain
from conformance.report.location import Location
from conformance.report.schema import CaseResult, Smallest
from tests.support.sample_reports import case, deviation, location, report

TP2, TP4 = "tp2-fp32-default-meta", "tp4-fp32-default-meta"


class Search:
    """Stand-in for runs with taps: the place of each case, or an error."""

    def __init__(self, answers: Mapping[str, Location | BaseException | None] | None = None) -> None:
        self.answers = answers or {}
        self.located: dict[str, Symptoms] = {}
        self.judged: list[str] = []

    def locate(self, of: Case, limit_s: float, symptoms: Symptoms) -> Location | None:
        assert 1.0 <= limit_s <= 30.0
        self.located[of.id] = symptoms
        answer = self.answers.get(of.id, location(of.id))
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def judge(self, of: Case, limit_s: float) -> Judged:
        self.judged.append(of.id)
        return Judged(of, "gloo", Verdict.FAIL, measured={"loss": deviation(0.25)})

    def __call__(self, *cases: CaseResult, budget_s: float = 30.0, **fields: Any) -> Located:
        shown = report(*cases, **fields)
        return Locator(cases, self.locate, self.judge, budget_s=budget_s).located(explain(shown))


def smallest(of: CaseResult, cell: str) -> Smallest:
    fixed: dict[str, Any] = {"features": {}, "bound": {}, "passes": True, "complete": True, "judged": 1}
    return Smallest(case=of.id, law=of.law, cell=cell, seconds=1.0, repro="", **fixed)


def test_each_cause_is_located_on_its_first_cell() -> None:
    search = Search()
    cases = [case(f"PAR-1/{cell}", "fail", loss=deviation(0.5)) for cell in (TP4, TP2, f"{TP2}-seed1")]
    found, error = search(*cases, case(f"MEM-1/{TP2}", "crash"), case(f"INIT-1/{TP2}"))
    assert ([each.case for each in found], error) == ([f"PAR-1/{TP2}", f"MEM-1/{TP2}"], None)
    assert search.located[f"PAR-1/{TP2}"] == Symptoms(cases[1].measured, cases[1].reason)
    assert search.judged == []


@pytest.mark.parametrize(
    "verdict", [verdict.value for verdict in Verdict if verdict not in ("fail", "crash", "timeout")]
)
def test_other_verdicts_are_not_located(verdict: str) -> None:
    search = Search()
    assert search(case(f"PAR-1/{TP2}", verdict)) == ([], None)
    assert search(case("PAR-1/unknown", "fail"), case(f"?/{TP2}", "fail")) == ([], None)
    assert search.located == {}


def test_the_smallest_cell_stands_for_its_cause() -> None:
    """Its metrics are judged from the records, since the session's are those of another cell."""
    search, failed = Search(), case(f"PAR-1/{TP4}", "fail")
    ((found,), _) = search(failed, smallest=[smallest(failed, TP2)])
    assert (found.case, found.cell) == (failed.id, TP2)
    assert search.judged == [f"PAR-1/{TP2}"]
    assert search.located == {f"PAR-1/{TP2}": Symptoms({"loss": deviation(0.25)}, "")}


def test_laws_of_one_chapter_share_the_place_of_their_cell() -> None:
    search = Search()
    laws = ("PAR-1", "CLIP-1", "MEM-1")
    found, _ = search(*(case(f"{law}/{TP2}", "fail", **{law: deviation(0.5)}) for law in laws))
    assert sorted(each.case for each in found) == sorted(f"{law}/{TP2}" for law in laws)
    assert len(search.located) == 2, "numbers and memory"


@pytest.mark.parametrize("first", [None, location(f"PAR-1/{TP2}", cell=TP4)])
def test_a_law_that_is_right_on_its_own_cell_shares_nothing(first: Location | None) -> None:
    """Laws of one chapter may compare different cells."""
    search = Search({f"CLIP-1/{TP2}": first, f"PAR-1/{TP2}": first})
    search(*(case(f"{law}/{TP2}", "fail", **{law: deviation(0.5)}) for law in ("PAR-1", "CLIP-1")))
    assert len(search.located) == 2


def test_an_error_ends_the_search_for_one_cause_alone() -> None:
    broken = Search({f"PAR-1/{TP2}": KeyError("a bug"), f"MEM-1/{TP2}": None})
    cases = [case(f"{law}/{TP2}", "fail") for law in ("PAR-1", "CLIP-1", "MEM-1", "INIT-1")]
    reasons = dict(zip(("PAR-1", "CLIP-1", "MEM-1", "INIT-1"), "abcd", strict=True))
    told = [CaseResult(**{**{f: getattr(c, f) for f in c.__struct_fields__}, "reason": reasons[c.law]}) for c in cases]
    found, error = broken(*told)
    assert [each.case for each in found] == [f"CLIP-1/{TP2}", f"INIT-1/{TP2}"]
    assert isinstance(error, KeyError)
    interrupted = Search({f"PAR-1/{TP2}": KeyboardInterrupt()})
    found, error = interrupted(*told)
    assert (found, type(error), len(interrupted.located)) == ([], KeyboardInterrupt, 1)


def test_the_search_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Search()
    now_s = iter([0.0, *[29.9] * 2, *[30.0] * 10])
    # In this module alone: other threads of the worker ask for the time as well.
    monkeypatch.setattr(locating, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    cases = [case(f"{law}/{TP2}", "fail", **{law: deviation(0.5)}) for law in ("PAR-1", "MEM-1", "INIT-1")]
    found, error = search(*cases)
    assert ([each.law for each in cases if each.id in search.located], len(found), error) == (["PAR-1"], 1, None)
