"""Known faults with the signature of a report: catalogue defects whose laws fail in it as the catalogue says."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from conformance.defects.signatures import Signature, signatures
from conformance.judge.verdicts import Verdict
from conformance.plan.selection import Facts, parse
from conformance.report.schema import CaseResult

_MOST = 5
"""Number of defects that are named: what more defects than that explain is explained by none."""
_JUDGED = (Verdict.PASS, Verdict.QUALITY_WARNING, Verdict.FAIL, Verdict.TIMEOUT)


class MatchingDefects:
    """Defects that a report speaks for and not against.

    A defect is spoken for by a law that it must break and that fails, and spoken against by one that passes, each on
    the cells that show the defect. Laws that were not judged there say nothing.
    """

    def __init__(self, cases: Sequence[CaseResult], facts: Mapping[str, Facts]) -> None:
        by_law: dict[str, list[CaseResult]] = defaultdict(list)
        for case in cases:
            if case.verdict in _JUDGED and case.cell in facts:
                by_law[case.law].append(case)
        explained = {s.id: (s, evidence) for s in signatures() if (evidence := _evidence(s, by_law, facts))}
        ranked = sorted(explained.values(), key=lambda match: (len(match[1]) < len(match[0].laws), -len(match[1])))
        self._cases = {
            signature.id: {case for of_law in evidence.values() for case in of_law} for signature, evidence in ranked
        }
        self._confirmed = {signature.id for signature, evidence in ranked if len(evidence) == len(signature.laws)}

    def of(self, cases: Sequence[CaseResult]) -> list[str]:
        """Return the ids of at most five defects that must fail some of the cases, those with most laws first.

        Defects for which all of their laws speak make those superfluous of which some law was not judged.
        """
        ids = {case.id for case in cases}
        defects = [defect for defect, explained in self._cases.items() if ids & explained]
        return ([defect for defect in defects if defect in self._confirmed] or defects)[:_MOST]


def _evidence(
    signature: Signature, by_law: Mapping[str, Sequence[CaseResult]], facts: Mapping[str, Facts]
) -> dict[str, list[str]]:
    """Return the ids of cases that fail as they must with a defect, by law; none if a law speaks against it."""
    evidence = {}
    for law, cases in _showing(signature, by_law, facts):
        expected = Verdict.TIMEOUT if signature.hangs else Verdict.FAIL
        failing = [case.id for case in cases if case.verdict == expected]
        if not failing:
            return {}
        evidence[law] = failing
    return evidence


def _showing(
    signature: Signature, by_law: Mapping[str, Sequence[CaseResult]], facts: Mapping[str, Facts]
) -> Iterator[tuple[str, list[CaseResult]]]:
    """Yield the laws that a defect must break, each with the cases that show it; no law without such a case."""
    if not signature.cells:
        return
    selected = parse(signature.cells).predicate
    for law in signature.laws:
        cases = [case for case in by_law.get(law, ()) if selected(facts[case.cell])]
        if cases:
            yield law, cases
