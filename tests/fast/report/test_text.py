"""End of a session in words: headline, failures, cases that were not judged, markdown, annotations for GitHub."""

import pytest
from expecttest import assert_expected_inline
from msgspec.structs import replace

from conformance.instruments.communication import Communication
from conformance.judge.verdicts import Verdict
from conformance.report.schema import Report
from conformance.report.text import annotations, headline, markdown, terminal_lines
from conformance.report.wording import bounds_text, derivation_text, is_outside, value_text
from tests.support.sample_reports import FACTS, bytes_of, case, count, deviation, location, report

DERIVATION = "bound 1e-05 = u (3 F + sqrt(tokens)); u = 5.96e-08, F = 105, tokens = 256"


def session() -> Report:
    """Two failures, three errors of the suite with one reason, and a case of each harmless verdict."""
    wrong = [
        replace(case(f"PAR-1/{mesh}", "fail", loss=deviation(value)), reason="loss is *far* off")
        for mesh, value in (("a", 0.5), ("b", 1e-6))
    ]
    errors = [replace(case(f"PAR-10/{mesh}", "error"), reason="disk full") for mesh in "abc"]
    issue = "https://github.com/pytorch/pytorch/issues/1"
    waived = [replace(case(f"CLIP-4/{mesh}", "waived"), reason=f"{issue}: {mesh} is local; off") for mesh in "ab"]
    others = [case("PAR-2/a"), replace(case("STREAM-2/a", "unsupported"), reason="needs 2 GPUs")]
    verdicts = {"pass": 1, "fail": 2, "error": 3, "unsupported": 1, "waived": 2}
    return report(*wrong, *errors, *waived, *others, verdicts=verdicts, exit_code=3)


def summed(*, laws: int = 1) -> Report:
    """Gradients twice too large, on cells of as many laws; PAR-1 passes on tensor-parallel cells."""
    metric = replace(deviation(1.0), ratio=2.0, at="layers.1.attention.wq.weight", terms={})
    cells = ("dp2-fp32-default-meta", "dp2-fp32-default-meta-sgd")
    cases = [case(f"PAR-{n}/{cell}", "fail", loss=metric) for n in range(1, laws + 1) for cell in cells]
    failed = [replace(each, repro=f"pytest {each.id}") for each in cases]
    return report(*failed, case("PAR-1/tp2-fp32-default-meta"), exit_code=1)


def terminal(shown: Report) -> str:
    return "\n".join(terminal_lines(shown, "report: here"))


def test_the_outcome_is_the_first_and_the_last_thing_told() -> None:
    text = terminal(replace(session(), selection="--cells 'tp = 2'"))
    headline = "THE SUITE FAILED (only --cells 'tp = 2'): torch 2.13.0, 2 x Fake (gloo), profile pr"
    assert text.startswith(f"{headline}\n1 case unsupported\n")
    assert text.endswith("\nTHE SUITE FAILED: 9 of 9 cases executed in 1.0 s, exit status 3; report: here")


def test_a_session_that_ended_early_tells_its_failure_and_counts_the_rest_in_one_line() -> None:
    rest = [replace(case(f"{law}/a", "not-run"), reason="the session ended") for law in ("MP-1", "MP-2", "MP-2")]
    ended = [case("PAR-2/a"), case("PAR-1/a", "fail")]
    text = terminal(report(*ended, *rest, executed=2, exit_code=1))
    assert text.startswith("NOT CONFORMANT (incomplete: 2 of 5 cases run): torch 2.13.0, 2 x Fake (gloo), profile pr\n")
    assert "\nNOT CONFORMANT (incomplete: 2 of 5 cases run): 2 of 5 cases executed" in text
    assert "\nnot-run, 3 cases of 2 laws: the session ended\n" in text
    assert not any(line.startswith("MP-") for line in text.splitlines()), "no rows of laws without a result"
    assert "not-run" not in next(line for line in text.splitlines() if line.startswith("law "))


def test_an_incomplete_session_without_a_failure_says_so_once_and_has_no_empty_table() -> None:
    text = terminal(report(case("MP-1/a", "not-run"), executed=0, exit_code=5))
    assert text.startswith("INCOMPLETE (0 of 1 case run): torch 2.13.0")
    assert "seconds" not in text


def test_an_incomplete_session_does_not_hide_an_error_of_the_suite() -> None:
    text = terminal(report(case("PAR-1/a", "error"), case("MP-1/a", "not-run"), executed=1, exit_code=5))
    assert text.startswith("INCOMPLETE (1 of 2 cases run, 1 error of the suite): torch 2.13.0")
    assert "error: PAR-1/a: why error" in text


def test_failures_come_before_the_table_and_cases_that_were_not_judged_after_it() -> None:
    text = terminal(session())
    failed, table, unjudged = (text.index(word) for word in ("What failed: 5 cases of 2 laws\n", "law  ", "waived, 2"))
    assert failed < table < unjudged
    assert text.count("disk full") == 1
    in_markdown = markdown(session())
    assert r"loss is \*far\* off" in in_markdown, "no marks but its own"
    assert "\n- unsupported, 1 case: needs 2 GPUs\n" in in_markdown
    assert "\n- waived, 2 cases: https://github.com/pytorch/pytorch/issues/1\n" in in_markdown
    assert "\n  3 cases of PAR-10\n" in text
    assert "\nwaived, 2 cases: https://github.com/pytorch/pytorch/issues/1\n" in text
    assert "unsupported, 1 case: needs 2 GPUs" in text
    assert "\ncoverage by laws on numbers: pairs 90 % of 10, triples 99.9 % of 3000\n" in text
    assert text.index("PAR-2 ") < text.index("PAR-10 "), "laws in their order"
    assert "1 of 1 case executed" in terminal(report(case("PAR-1/a")))


def test_one_cause_is_told_once() -> None:
    text = terminal(summed(laws=3))
    assert_expected_inline(
        text[: text.index("law  ")],
        """\
NOT CONFORMANT: torch 2.13.0, 2 x Fake (gloo), profile pr

What failed: 6 cases of 3 laws; in all of them measured is 2.000 times expected = dp_shard or dp

fail: PAR-1/dp2-fp32-default-meta: why fail
  It MUST.
  2 cases of PAR-1: measured is 2.000 times expected = dp_shard or dp, worst in layers.*.attention.wq.weight
  the same ratio in 2 cases of PAR-2, 2 cases of PAR-3
  only where mesh = dp2 (all that failed, none that passed)
  known faults with this signature: loss-local-token-mean
  repeat: pytest PAR-1/dp2-fp32-default-meta

""",
    )


def located() -> Report:
    """Three laws that fail for one wrong place, which for the last one was found on a smaller cell."""
    cells = ("tp2-fp32-default-meta", "tp2-fp32-default-meta", "tp4-fp32-default-meta")
    failed = [
        replace(case(f"{law}/{cell}", "fail"), reason=f"why {law}", repro=f"pytest {law}")
        for law, cell in zip(("PAR-1", "CLIP-1", "OPT-1"), cells, strict=True)
    ]
    places = [location(each.id, cell=cells[0], agrees="", collective="", called=None) for each in failed]
    return report(*failed, locations=places, exit_code=1)


def test_the_first_wrong_place_is_told_once_for_all_that_fail_for_it() -> None:
    text = terminal(located())
    assert_expected_inline(
        text[: text.index("law  ")],
        """\
NOT CONFORMANT: torch 2.13.0, 2 x Fake (gloo), profile pr

What failed: 3 cases of 3 laws; first wrong in all of them: backward: layers.1.attention.wo, gradient of its input

fail: PAR-1/tp2-fp32-default-meta: why PAR-1
  It MUST.
  first wrong: backward: layers.1.attention.wo, gradient of its input on tp rank 1 of 2, step 0; 0.5 x expected = 1/tp
  the same first wrong place in 1 case of CLIP-1, 1 case of OPT-1
  known faults with this signature: sp-norm-grad-averaged, tp-sums-cut
  repeat: pytest PAR-1

""",
    )
    (error,) = annotations(located())
    sentence = located().locations[0].sentence
    assert [shown.count(sentence) for shown in (text, markdown(located()), error)] == [1, 1, 1]


def test_a_place_that_was_found_on_another_cell_names_it() -> None:
    shown = replace(located(), locations=located().locations[2:])
    assert "on tp rank 1 of 2, step 0; 0.5 x expected = 1/tp; seen on tp2-fp32-default-meta\n" in terminal(shown)


def test_a_failure_shows_the_derivation_of_the_bound_that_is_broken() -> None:
    line = f"loss at layers.0.attention.wk.bias: 0.5 relative Frobenius deviation, {DERIVATION}"
    assert terminal(session()).count(f"\n  {line}\n") == 1, "of the metric that is outside of its bound alone"
    assert markdown(session()).count(line) == 1


def test_ten_causes_are_told_and_the_number_of_the_others() -> None:
    failed = [replace(case(f"PAR-{number}/a", "error"), reason="abcdefghijkl"[number]) for number in range(12)]
    for text in (terminal(report(*failed)), markdown(report(*failed))):
        assert text.count("error") - text.count("error  ") == text.count("It MUST.") == 10
        assert "and 2 more groups of failures: see report.html" in text


DRIFTED = case("MEM-1/a", "quality-warning")
TRIPLED = case("CLIP-1/dp2-fp32-default-meta", "fail", norm=replace(deviation(1.0), ratio=3.0))
EXPLAINED = replace(case("PAR-1/a", "fail", loss=deviation(0.5)), reason=f"bound 1e-05 = {deviation(0.5).formula}")
WAITED = [replace(case(f"PAR-1/{mesh}"), wait_s=0.6) for mesh in "ab"]
EXPOSED = {
    cell: replace(FACTS, communication=Communication(step_s=0.1, busy_s=exposed_s, exposed_s=exposed_s))
    for cell, exposed_s in (("a", 0.01), ("b", 0.04), ("c", 0.02))
}
SENTENCES: dict[str, tuple[Report, ...]] = {
    "What failed: 3 cases of 2 laws\n": (report(*summed().cases, TRIPLED),),
    "1 case of CLIP-1: measured is 3.000 times expected, worst in layers.*.attention.wk.bias\n": (report(TRIPLED),),
    "\n  terms of the bound: u = 5.96e-08, F = 105, tokens = 256\n": (report(EXPLAINED),),
    "What drifted from the baseline: 1 case of 1 law\n": (report(DRIFTED), report(case("PAR-1/a", "fail"))),
    "; besides, 1 case of 1 law drifted from the baseline\n": (
        report(DRIFTED, case("PAR-1/a", "fail")),
        report(DRIFTED),
    ),
    "\ncases waited 1 s in total for devices, processors or another worker's run\n": (
        report(*WAITED),
        report(WAITED[0]),
    ),
    "a step communicates while nothing is computed for 20% of its time in the median of 3 cells, for 40% in b": (
        report(cells={**EXPOSED, "without": FACTS}),
        session(),
    ),
    "\nno case is selected: see python -m conformance list": (report(planned=0, executed=0), session()),
}
"""Sentences, each with a report in which it is told, and possibly another one in which it is not."""


@pytest.mark.parametrize(("sentence", "reports"), SENTENCES.items())
def test_sentences(sentence: str, reports: tuple[Report, ...]) -> None:
    assert [sentence in terminal(shown) for shown in reports] == [True, False][: len(reports)]


def test_long_reasons_are_shortened_and_formulas_are_told_once() -> None:
    text = terminal(report(replace(case("API-1/a", "fail"), reason=f"{'wrong ' * 200}elements")))
    assert "wrong ... (see report.html)\n" in text
    assert "elements" not in text
    assert terminal(report(EXPLAINED)).count(deviation(0.5).formula) == 1


def test_metrics_in_words() -> None:
    assert value_text(deviation(None)) == "not finite"
    assert bounds_text(bytes_of(1, lower=2)) == "2 to "
    assert bounds_text(bytes_of(1)) == derivation_text(bytes_of(1)) == ""
    assert derivation_text(deviation(1.0)) == DERIVATION
    outside = [bytes_of(1, lower=2), bytes_of(3, upper=2), deviation(None)]
    assert all(map(is_outside, outside))
    assert not any(map(is_outside, [bytes_of(1), bytes_of(2, lower=2, upper=2), count(3)]))


def test_markdown() -> None:
    text = markdown(replace(summed(laws=2), defect="grads-summed", verdicts={"pass": 1, "fail": 4}))
    assert_expected_inline(
        text,
        """\
## NOT CONFORMANT (defect grads-summed injected): torch 2.13.0, 2 x Fake (gloo), profile pr

5 of 5 cases executed in 1.0 s, exit status 1

### What failed

4 cases of 2 laws; in all of them measured is 2.000 times expected = dp\\_shard or dp

- **fail** `PAR-1/dp2-fp32-default-meta`: why fail. It MUST.
  - 2 cases of PAR-1: measured is 2.000 times expected = dp\\_shard or dp, worst in layers.\\*.attention.wq.weight
  - the same ratio in 2 cases of PAR-2
  - only where mesh = dp2 (all that failed, none that passed)
  - known faults with this signature: loss-local-token-mean

  ```
  pytest PAR-1/dp2-fp32-default-meta
  ```

| law   |   pass |   fail |   seconds |
|-------|--------|--------|-----------|
| PAR-1 |      1 |      2 |         3 |
| PAR-2 |        |      2 |         2 |

- coverage by laws on numbers: pairs 90 % of 10, triples 99.9 % of 3000
""",
    )


# Headline

CPU = {
    "packages": {"torch": "2.13.0+cpu"},
    "device": {"type": "cpu", "name": "Fake", "count": 2},
    "cannot_show": "NCCL, CUDA streams",
}


def on_cpu(**fields: object) -> Report:
    simulated = replace(case("MEM-1/a"), substrate="simulated")
    unsupported = replace(case("STREAM-2/a", "unsupported"), substrate="nccl")
    shown = report(case("PAR-1/a"), simulated, unsupported)
    return replace(shown, **{"environment": CPU, **fields})


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
    shown = on_cpu(exit_code=exit_code)
    assert headline(shown).outcome == outcome
    assert headline(shown).line.startswith(f"{outcome}: torch 2.13.0+cpu, CPU (gloo, simulated), profile pr")


def test_a_narrowed_session_with_a_defect_says_so_in_the_first_line() -> None:
    """The line names the substrates of judged cases alone."""
    line = headline(on_cpu(selection="--cells 'tp = 2'", defect="grads-summed", exit_code=1)).line
    subject = "torch 2.13.0+cpu, CPU (gloo, simulated), profile pr"
    assert line == f"NOT CONFORMANT (only --cells 'tp = 2'; defect grads-summed injected): {subject}"
    assert headline(report()).subject == "torch 2.13.0, 2 x Fake, profile pr"


def test_a_session_names_features_that_it_cannot_show() -> None:
    assert headline(on_cpu()).nothing_about == "nothing about NCCL, CUDA streams: 1 case unsupported"
    assert headline(on_cpu(cases=[])).nothing_about == "nothing about NCCL, CUDA streams"
    assert headline(report(case("STREAM-2/a", "unsupported"))).nothing_about == "1 case unsupported"
    assert headline(report(case("PAR-1/a"))).nothing_about == ""


# Annotations for GitHub Actions

DP2 = "dp2-fp32-default-meta"


@pytest.fixture(autouse=True)
def github(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")


@pytest.mark.parametrize(
    ("verdict", "kind"),
    [
        *((verdict, None) for verdict in (Verdict.PASS, Verdict.UNSUPPORTED, Verdict.WAIVED)),
        (Verdict.QUALITY_WARNING, "warning"),
        *((verdict, "error") for verdict in (Verdict.FAIL, Verdict.UNEXPECTED_PASS, Verdict.CRASH, Verdict.ERROR)),
    ],
)
def test_a_failure_is_an_error_and_drift_is_a_warning(verdict: Verdict, kind: str | None) -> None:
    lines = annotations(report(case(f"PAR-1/{DP2}", verdict.value)))
    assert [line.split()[0] for line in lines] == ([f"::{kind}"] if kind else [])


def test_a_cause_is_one_error_with_law_cell_and_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """GitHub shows ten of them, and needs some characters escaped."""
    failures = [replace(case(f"PAR-1/{DP2}", "fail"), reason=f"why {letter}") for letter in "abcdefghijkl"]
    assert len(annotations(report(*failures))) == 10
    (line,) = annotations(report(*(case(f"PAR-1/{mesh}-fp32-default-meta", "fail") for mesh in ("dp2", "dp4"))))
    assert line.startswith(f"::error title=fail%3A PAR-1/{DP2}::why fail%0A2 cases of PAR-1")
    (escaped,) = annotations(report(replace(case("PAR-1/a,b", "fail"), reason="100 %: a, b")))
    assert escaped == "::error title=fail%3A PAR-1/a%2Cb::100 %25: a, b"
    monkeypatch.delenv("GITHUB_ACTIONS")
    assert annotations(report(*failures)) == []
