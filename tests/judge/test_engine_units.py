"""The small parts of the engine: verdicts, measurements, comparisons, laws, records, report."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from torch import Tensor

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.judge.law import Law, law, law_of
from conformance.judge.measurements import Measurement, collecting, measure
from conformance.judge.skips import Unsupported
from conformance.judge.verdicts import Verdict, classify, exit_status
from conformance.laws import compare
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.plan.substrates import REAL
from conformance.project import PACKAGE, PROJECT
from conformance.report.environment import environment_facts
from conformance.report.schema import CaseResult, Report
from conformance.run.devices.hardware import NO_DEVICES
from conformance.run.failures import RunFailed, waits_for_peers
from conformance.run.ranks.messages import RankReport
from conformance.run.record import Failure, Header, Record, RecordFile, read_record, write_record
from conformance.run.store import CellFailed, to_failure

NAN, INF = math.nan, math.inf


# Verdicts


def cell_failed(kind: Any) -> CellFailed:
    return CellFailed(Failure(kind=kind, first_rank=1, reason="rank 1 did it", details="all\nranks"))


@pytest.mark.parametrize(
    ("error", "verdict", "reason"),
    [
        (ConformanceFailure("loss: 2 is not 1\nmore"), Verdict.FAIL, "loss: 2 is not 1"),
        (AssertionError(), Verdict.FAIL, "AssertionError"),
        (cell_failed("raised"), Verdict.FAIL, "rank 1 did it"),
        (cell_failed("crash"), Verdict.CRASH, "rank 1 did it"),
        (cell_failed("timeout"), Verdict.TIMEOUT, "rank 1 did it"),
        (cell_failed("suite-error"), Verdict.ERROR, "rank 1 did it"),
        (Unsupported("needs 8 CUDA devices, found 0"), Verdict.UNSUPPORTED, "needs 8 CUDA devices, found 0"),
        (pytest.skip.Exception("a skip is never a pass"), Verdict.ERROR, "Skipped: a skip is never a pass"),
        (KeyError("gone"), Verdict.ERROR, "KeyError: 'gone'"),
        (TimeoutError(), Verdict.ERROR, "TimeoutError: TimeoutError"),
    ],
)
def test_classify(error: BaseException, verdict: Verdict, reason: str) -> None:
    assert classify(error) == (verdict, reason)


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([], 5),
        (["unsupported", "unsupported"], 5),
        (["pass"], 0),
        (["pass", "unsupported", "waived", "quality-warning"], 0),
        (["waived"], 0),
        (["pass", "fail"], 1),
        (["pass", "unexpected-pass"], 1),
        (["pass", "timeout"], 1),
        (["pass", "crash"], 1),
        (["pass", "error"], 3),
        (["fail", "error", "crash"], 3),
        (["pass", "not-run"], 5),
        (["fail", "error", "not-run"], 5),
    ],
)
def test_exit_status(verdicts: list[str], status: int) -> None:
    assert exit_status({Verdict(name): verdicts.count(name) for name in verdicts}) == status


def test_every_verdict_decides_the_exit_status() -> None:
    alone = {verdict.value: exit_status({verdict: 1}) for verdict in Verdict}
    assert alone == {
        "pass": 0,
        "quality-warning": 0,
        "unsupported": 5,
        "waived": 0,
        "fail": 1,
        "unexpected-pass": 1,
        "timeout": 1,
        "crash": 1,
        "error": 3,
        "not-run": 5,
    }


# Measurements


def test_measurements_go_to_the_running_case_only() -> None:
    measure("lost", 1.0, unit="s")
    with collecting() as outer:
        measure("a", 1, lower=0, upper=2, unit="s")
        with collecting() as inner:
            measure("b", INF, upper=1.0, unit="s")
            measure("c", NAN, unit="s")
        measure("a", 2, unit="m")
    measure("lost", 1.0, unit="s")
    assert outer == {"a": Measurement(2.0, None, None, "m")}
    assert inner == {"b": Measurement(None, None, 1.0, "s"), "c": Measurement(None, None, None, "s")}
    assert type(outer["a"].value) is float


# Comparisons


def tensor(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def bit_pattern(*patterns: int) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int32).view(torch.float32)


def run_comparison(compared: Callable[[], None]) -> tuple[dict[str, Measurement], str]:
    """What it measured, and its message if it failed."""
    with collecting() as measured:
        try:
            compared()
        except ConformanceFailure as failure:
            return measured, str(failure)
    return measured, ""


@pytest.mark.parametrize(
    ("measured", "expected", "within", "value", "message"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0.0, ""),
        ([1.0, 2.1], [1.0, 2.0], 0.06, 0.05, ""),
        (
            [1.0, 2.1],
            [1.0, 2.0],
            0.04,
            0.05,
            "x at step 1: measured 2.1, expected 2.0; relative deviation 0.05 is above",
        ),
        ([0.5], [0.0], 0.6, 0.5, ""),
        ([1.0, NAN], [1.0, 1.0], 9.0, None, "x at step 1: measured nan, expected 1.0"),
        ([INF], [1.0], 9.0, None, "x at step 0: measured inf"),
        ([1.0, 1.0], [1.0, NAN], 9.0, None, "x at step 1: measured 1.0, expected nan"),
        ([1.0, 1.0], [1.0, INF], 9.0, None, "x at step 1: measured 1.0, expected inf"),
        ([NAN], [NAN], 9.0, None, "x at step 0: measured nan"),
        ([1.0], [1.0], NAN, 0.0, "is above nan"),
    ],
)
def test_scalars(
    measured: list[float], expected: list[float], within: float, value: float | None, message: str
) -> None:
    found, said = run_comparison(lambda: compare.scalars(measured, expected, name="x", within=within))
    assert message in said
    assert bool(said) is bool(message)
    assert found["x"].value == (value if value is None else pytest.approx(value))
    assert (found["x"].lower, found["x"].unit) == (0.0, "relative deviation")


def test_scalars_of_other_lengths_differ() -> None:
    _, said = run_comparison(lambda: compare.scalars([1.0], [1.0, 2.0], name="x", within=9.0))
    assert said == "x: 1 steps measured, 2 expected"


@pytest.mark.parametrize(
    ("measured", "expected", "within", "message"),
    [
        ({"a": tensor(3, 4)}, {"a": tensor(3, 4)}, 0.0, ""),
        ({"a": tensor(3, 5)}, {"a": tensor(3, 4)}, 0.21, ""),
        (
            {"a": tensor(3, 5)},
            {"a": tensor(3, 4)},
            0.19,
            "x of a: relative Frobenius deviation 0.2 is above 0.19 (norm measured 5.83095, expected 5)",
        ),
        # The worst is the one that exceeds its own bound the most.
        ({"a": tensor(1.5), "b": tensor(1.2)}, {"a": tensor(1), "b": tensor(1)}, {"a": 1.0, "b": 0.1}, "x of b:"),
        ({"a": tensor(1), "b": tensor(1.5)}, {"a": tensor(1), "b": tensor(1)}, {"a": 1.0, "b": 0.0}, "x of b:"),
        ({"a": tensor(1), "b": tensor(1)}, {"a": tensor(1), "b": tensor(1)}, {"a": 1.0, "b": NAN}, "is above nan"),
        ({"a": tensor(0)}, {"a": tensor(0)}, 0.0, ""),
        ({"a": tensor(0.5)}, {"a": tensor(0)}, 0.4, "deviation 0.5 is above 0.4"),
        ({"a": tensor(0)}, {"a": tensor(1)}, 0.9, "deviation 1 is above 0.9"),
        ({"a": tensor(1), "b": tensor(NAN)}, {"a": tensor(1), "b": tensor(1)}, 9.0, "x of b: relative"),
        ({"a": tensor(1), "b": tensor(INF)}, {"a": tensor(1), "b": tensor(INF)}, 9.0, "x of b: relative"),
        ({"a": tensor(1), "b": tensor(1)}, {"a": tensor(1), "b": tensor(NAN)}, 9.0, "x of b: relative"),
        ({"a": torch.ones(2, 3)}, {"a": torch.ones(3, 2)}, 9.0, "deviation inf is above 9"),
        ({"a": tensor(1, dtype=torch.bfloat16)}, {"a": tensor(1, dtype=torch.float64)}, 0.0, ""),
        ({"a": tensor(1)}, {"b": tensor(1)}, 9.0, "x: missing ['b'], superfluous ['a']"),
        ({}, {"b": tensor(1)}, 9.0, "x: missing ['b'], superfluous []"),
    ],
)
def test_tensors(
    measured: dict[str, Tensor], expected: dict[str, Tensor], within: float | dict[str, float], message: str
) -> None:
    _, said = run_comparison(lambda: compare.tensors(measured, expected, name="x", within=within))
    assert message in said
    assert bool(said) is bool(message)


def test_tensors_are_judged_by_their_change() -> None:
    origin, expected, measured = {"a": tensor(1000)}, {"a": tensor(1001)}, {"a": tensor(1001.5)}
    assert run_comparison(lambda: compare.tensors(measured, expected, name="x", within=0.1))[1] == ""
    found, said = run_comparison(lambda: compare.tensors(measured, expected, name="x", within=0.1, origin=origin))
    assert "deviation 0.5 is above 0.1" in said
    assert found == {"x": Measurement(0.5, 0.0, 0.1, "relative Frobenius deviation of a")}
    bad_origin = {"a": tensor(NAN)}
    assert run_comparison(lambda: compare.tensors(measured, expected, name="x", within=9.0, origin=bad_origin))[1]


@pytest.mark.parametrize(
    ("measured", "expected", "message"),
    [
        (tensor(1, -0.0), tensor(1, -0.0), ""),
        (tensor(1, -0.0), tensor(1, 0.0), "1 of 1 tensors differ in bits; a in 1 of 2 elements, by up to 0"),
        (bit_pattern(0x7FC00000), bit_pattern(0x7FC00000), ""),
        (bit_pattern(0x7FC00001), bit_pattern(0x7FC00000), "a in 1 of 1 elements, by up to nan"),
        (tensor(1, 2, 3), tensor(1, 2.5, 4), "a in 2 of 3 elements, by up to 1"),
        (torch.ones(2, 3), torch.ones(3, 2), "a is float32 of shape (2, 3), expected float32 of shape (3, 2)"),
        (torch.ones(1), torch.ones(1, dtype=torch.bfloat16), "a is float32 of shape (1,), expected bfloat16 of shape"),
        (torch.ones(2, 3).t(), torch.ones(3, 2), ""),
        (torch.tensor(1.0), torch.tensor(1.0), ""),
        (torch.empty(0, 4), torch.empty(0, 4), ""),
        (torch.tensor([True]), torch.tensor([False]), "a in 1 of 1 elements"),
    ],
)
def test_bits(measured: Tensor, expected: Tensor, message: str) -> None:
    found, said = run_comparison(lambda: compare.bits({"a": measured}, {"a": expected}, name="x"))
    assert message in said
    assert bool(said) is bool(message)
    assert found["x"] == Measurement(float(bool(message)), 0, 0, "tensors that differ, of 1")


def test_nothing_is_never_equal_to_nothing() -> None:
    with pytest.raises(ValueError, match="no tensors to compare"):
        compare.bits({}, {}, name="x")
    with pytest.raises(ValueError, match="no tensors to compare"):
        compare.tensors({}, {}, name="x", within=1.0)
    with pytest.raises(ValueError, match="empty"):
        compare.scalars([], [], name="x", within=1.0)


def test_count() -> None:
    found, said = run_comparison(lambda: compare.count(3, name="x", expected=4, detail="rank 1", unit="ranks"))
    assert said == "x: measured 3, expected 4 ranks; rank 1"
    assert found == {"x": Measurement(3.0, 4, 4, "ranks")}
    assert run_comparison(lambda: compare.count(4, name="x", expected=4, unit="ranks"))[1] == ""


# Laws


def test_law_states_a_must() -> None:
    @law("PAR-7", reference="https://example.org", since="2.9")
    def test_it() -> None:
        """Shards MUST
        add up.

        Wrong if not.
        """

    assert law_of(test_it) == Law("PAR-7", "Shards MUST add up.", "https://example.org", "2.9", REAL)
    assert law_of(test_law_states_a_must) is None
    assert law_of(None) is None


@pytest.mark.parametrize("docstring", [None, "Shards must add up.", "Shards add up.\n\nThey MUST."])
def test_law_without_a_must_is_refused(docstring: str | None) -> None:
    def test_it() -> None:
        pass

    test_it.__doc__ = docstring
    with pytest.raises(ValueError, match=r"law PAR-7: .* test_it's docstring must say what MUST hold"):
        law("PAR-7", reference="")(test_it)


# Failures and records


def raised_at(file: str) -> RunFailed:
    report = RankReport(rank=1, state="raised", stamp_s=1.0, exception_type="E", message="m", innermost_file=file)
    ranks = (RankReport(rank=0, state="finished"), report)
    return RunFailed(kind="raised", first_rank=1, reason="rank 1 raised E: m", ranks=ranks)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (str(PACKAGE / "instruments" / "poison.py"), "suite-error"),
        (str(PACKAGE / "defects" / "loss_faults.py"), "suite-error"),
        (str(PACKAGE.with_name("conformance_of_others") / "x.py"), "raised"),
        (str(PROJECT / "reference_trainer" / "train.py"), "raised"),
        (torch.__file__, "raised"),
        ("<string>", "raised"),
        ("", "raised"),
    ],
)
def test_who_is_to_blame(file: str, kind: str) -> None:
    failure = to_failure(raised_at(file))
    assert (failure.kind, failure.first_rank, failure.reason) == (kind, 1, "rank 1 raised E: m")
    assert "--- rank 0 finished" in failure.details


def test_an_operator_that_fails_under_the_tap_is_not_the_suite() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught, DispatchTap([]):
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    innermost = str(caught.traceback[-1].path)
    assert to_failure(raised_at(innermost)).kind == "raised"


def test_a_rank_that_waits_under_the_tap_waits_for_its_peers() -> None:
    """Otherwise it would be blamed for a hang of another rank."""

    def stack(*files: str) -> str:
        return "\n".join(["Thread 0x1 (most recent call first):", *(f'  File "{f}", line 1 in f' for f in files)])

    tap = ["/x/torch/_ops.py", "/y/conformance/instruments/dispatch_tap.py", "/x/torch/_dynamo/eval_frame.py"]
    tap += ["/x/torch/_compile.py", "/x/torch/_library/autograd.py", "/x/torch/_ops.py"]
    assert waits_for_peers(stack(*tap, "/x/torch/distributed/_functional_collectives.py"))
    assert not waits_for_peers(stack(*tap, *["/x/model.py"] * 3, "/x/torch/distributed/fsdp/_fsdp_state.py"))


@pytest.mark.parametrize("failure", [None, cell_failed("timeout").failure])
def test_record_round_trip(tmp_path: Path, failure: Failure | None) -> None:
    cell = Cell(mesh="dp2-tp2", clip=0.0)
    header = Header(cell=cell, session="s", torch="2.13.0", substrate="gloo", defect=None)
    content = RecordFile(header=header, train_s=0.5, ranks=msgspec.Raw(b'[{"rank":0}]'), failure=failure)
    assert read_record(tmp_path) is None
    write_record(tmp_path, content)
    found = read_record(tmp_path)
    assert found is not None
    assert (found.header, found.train_s, found.failure) == (header, 0.5, failure)
    assert msgspec.json.decode(found.ranks) == [{"rank": 0}]
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]
    assert Record(tmp_path, found).cell == cell


def test_report_round_trip() -> None:
    case = CaseResult(
        id="PAR-1/dp2",
        law="PAR-1",
        must="It MUST.",
        cell="dp2",
        substrate="gloo",
        verdict="pass",
        reason="",
        duration_s=1.0,
        wait_s=0.0,
        run_s=0.5,
        measured={"loss": Measurement(None, 0.0, 1.0, "nats")},
        repro="pytest",
        nodeid="x.py::y[dp2]",
    )
    assert msgspec.convert(msgspec.to_builtins(case), CaseResult) == case
    report = Report(
        session="s",
        environment={"torch": "2.13.0"},
        profile="pr",
        seed=0,
        started="2026-11-21T10:00:00",
        suite_digest="1",
        matrix_digest="0",
        defect=None,
        planned=1,
        executed=1,
        verdicts={"pass": 1},
        exit_code=0,
        duration_s=1.0,
        cells={},
        cases=[case],
    )
    text = msgspec.json.encode(report)
    assert msgspec.json.decode(text, type=Report) == report
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.json.decode(text.replace(b'"profile"', b'"proffile"'), type=Report)


def test_environment_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SOMETHING", "1")
    monkeypatch.setenv("PASSWORD", "secret")
    facts = environment_facts(NO_DEVICES)
    assert facts["packages"]["torch"] == torch.__version__
    assert facts["memory_bytes"] == psutil.virtual_memory().total
    assert facts["variables"]["TORCH_SOMETHING"] == "1"
    assert "secret" not in str(facts)
    assert (facts["substrate"], facts["device"]["type"], facts["cannot_show"]) == ("gloo", "cpu", "")
    assert "git" in facts
    assert msgspec.json.decode(msgspec.json.encode(facts)) == facts
