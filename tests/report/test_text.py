"""End of a session in words: what is told, and how often."""

from pathlib import Path

import msgspec
from expecttest import assert_expected_inline

from conformance.instruments.communication import Communication
from conformance.report.schema import Report
from conformance.report.text import markdown, terminal_lines
from conformance.report.wording import bounds_text, derivation_text, is_outside, value_text
from tests.report.sample_reports import FACTS, bytes_of, case, count, deviation, report

DERIVATION = "bound 1e-05 = u (3 F + sqrt(tokens)); u = 5.96e-08, F = 105, tokens = 256"


def session() -> Report:
    """Two failures, three errors of the suite with one reason, and a case of each harmless verdict."""
    wrong = [
        msgspec.structs.replace(case(f"PAR-1/{mesh}", "fail", loss=deviation(value)), reason="loss is *far* off")
        for mesh, value in (("a", 0.5), ("b", 1e-6))
    ]
    errors = [msgspec.structs.replace(case(f"PAR-10/{mesh}", "error"), reason="disk full") for mesh in "abc"]
    others = [case("PAR-2/a"), msgspec.structs.replace(case("STREAM-2/a", "unsupported"), reason="needs 2 GPUs")]
    verdicts = {"pass": 1, "fail": 2, "error": 3, "unsupported": 1}
    return report(*wrong, *errors, *others, verdicts=verdicts, planned=7, executed=7, exit_code=3, duration_s=1.0)


def terminal(shown: Report) -> str:
    return "\n".join(terminal_lines(shown, Path("here")))


def test_the_end_of_a_session() -> None:
    text = terminal(session())
    assert text.count("disk full") == 1
    assert "and 2 cases with the same reason" in text
    assert "unsupported, 1 case: needs 2 GPUs" in text
    assert text.index("PAR-2 ") < text.index("PAR-10 "), "laws in their order"
    assert text.endswith("\nprofile pr: 7 of 7 cases executed in 1.0 s, exit status 3; report: here")


def test_a_failure_shows_the_derivation_of_the_bound_that_is_broken() -> None:
    line = f"loss at layers.0.attention.wk.bias: 0.5 relative Frobenius deviation, {DERIVATION}"
    assert terminal(session()).count(f"\n  {line}\n") == 1, "of the metric that is outside of its bound alone"
    assert markdown(session()).count(line) == 1


def test_a_formula_that_the_reason_has_is_not_told_twice() -> None:
    metric = deviation(0.5)
    failed = msgspec.structs.replace(case("PAR-1/a", "fail", loss=metric), reason=f"bound 1e-05 = {metric.formula}")
    text = terminal(report(failed))
    assert text.count(metric.formula) == 1
    assert "\n  terms of the bound: u = 5.96e-08, F = 105, tokens = 256\n" in text


def test_numbers_and_nouns_agree() -> None:
    errors = [msgspec.structs.replace(case(f"PAR-1/{mesh}", "error"), reason="disk full") for mesh in "ab"]
    text = terminal(report(*errors, case("PAR-2/a", "unsupported"), case("PAR-2/b", "unsupported")))
    assert "and 1 case with the same reason" in text
    assert "unsupported, 2 cases: why unsupported" in text
    assert "1 of 1 case executed" in terminal(report(case("PAR-1/a")))


def test_metrics_in_words() -> None:
    assert value_text(deviation(None)) == "not finite"
    assert bounds_text(bytes_of(1, lower=2)) == "2 to "
    assert bounds_text(bytes_of(1)) == derivation_text(bytes_of(1)) == ""
    assert derivation_text(deviation(1.0)) == DERIVATION
    outside = [bytes_of(1, lower=2), bytes_of(3, upper=2), deviation(None)]
    assert all(map(is_outside, outside))
    assert not any(map(is_outside, [bytes_of(1), bytes_of(2, lower=2, upper=2), count(3)]))


def test_time_that_cases_waited_is_told_from_one_second_on() -> None:
    waited = [msgspec.structs.replace(case(f"PAR-1/{mesh}"), wait_s=0.6) for mesh in "ab"]
    assert "waited" not in terminal(report(waited[0]))
    line = "cases waited 1 s in total for devices, processors or another worker's run"
    assert f"\n{line}\n" in terminal(report(*waited))


def test_communication_that_nothing_hides_is_told_as_a_fact() -> None:
    shares = {"a": 0.01, "b": 0.04, "c": 0.02}
    cells = {
        name: msgspec.structs.replace(
            FACTS, communication=Communication(step_s=0.1, busy_s=exposed_s, exposed_s=exposed_s)
        )
        for name, exposed_s in shares.items()
    }
    text = terminal(report(cells={**cells, "without": FACTS}))
    assert (
        "a step communicates while nothing is computed for 20% of its time in the median of 3 cells, for 40% in b"
    ) in text
    assert "communicates" not in terminal(session())


def test_nothing_selected_says_what_to_do() -> None:
    first, *_ = terminal_lines(report(planned=0, executed=0), Path("here"))
    assert first.startswith("no case is selected: see python -m conformance list")


def test_markdown() -> None:
    text = markdown(session())
    assert_expected_inline(
        text[text.index("| law") :],
        """\
| law      |   pass |   unsupported |   fail |   error |   seconds |
|----------|--------|---------------|--------|---------|-----------|
| PAR-1    |        |               |      2 |         |         2 |
| PAR-2    |      1 |               |        |         |         1 |
| PAR-10   |        |               |        |       3 |         3 |
| STREAM-2 |        |             1 |        |         |         1 |
""",
    )
    assert text.startswith("## Conformance: profile pr: 7 of 7 cases executed")
    assert text.count("- **fail** `PAR-1/") == 2
    assert r"loss is \*far\* off" in text
