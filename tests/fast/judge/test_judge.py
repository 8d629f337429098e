"""The pipeline from a case to its verdict: support, laws, exceptions, waivers and the exit status."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from conformance.judge.judge import Judged, judge
from conformance.judge.law import Law, law, law_of
from conformance.judge.measurements import Measurement, measure
from conformance.judge.registry import asserted_laws
from conformance.judge.support import Machine, unsupported
from conformance.judge.verdicts import Verdict, classify, exit_status
from conformance.judge.waivers import Symptom, Waiver
from conformance.outcomes import CellFailed, ConformanceFailure, Failure, Unsupported
from conformance.plan.cells import Cell
from conformance.plan.matrix import Case
from conformance.plan.scopes import scope
from conformance.plan.substrates import REAL
from conformance.run.case_runs import CaseRuns
from conformance.run.devices.hardware import Hardware, SimulatedDevice
from conformance.run.store import RecordStore
from tests.support.fake_devices import some_devices

CASE = Case("PAR-1", Cell(mesh="dp2"))
MACHINE = Machine(hardware=Hardware(), torch_version="2.13.0+cpu", max_world_size=8)
WAIVER = Waiver(
    law="PAR-1",
    cells="world = 2",
    device="cpu",
    torch="2.13 - 2.13",
    issue="https://github.com/pytorch/pytorch/issues/1",
    reason="it is so",
    expires="2027-01-31",
    shows=[Symptom(metric="difference", least=3.0, most=3.0)],
)


@pytest.fixture
def judged() -> Callable[..., Judged]:
    """Function that judges `CASE` by a law whose test ends with an exception, or passes."""
    store = RecordStore.__new__(RecordStore)  # these tests of laws run nothing

    def run(
        outcome: BaseException | None = None, *, since: str = "2.6", upper: float = 4.0, **options: object
    ) -> Judged:
        @law("PAR-1", where="world > 1", reference="https://docs.pytorch.org", since=since)
        def test(cell: Cell) -> None:
            """Ranks MUST agree."""
            assert cell == CASE.cell
            measure("difference", 3.0, upper=upper, unit="bytes", kind="memory")
            if outcome:
                raise outcome

        declared = law_of(test)
        assert declared is not None
        return judge(CASE, declared, test, store, **{"machine": MACHINE, **options})  # type: ignore[arg-type]

    return run


@pytest.mark.parametrize(
    ("outcome", "verdict", "reason"),
    [
        (None, Verdict.PASS, ""),
        (ConformanceFailure("4 is above 3"), Verdict.FAIL, "4 is above 3"),
        (Unsupported("no such API"), Verdict.UNSUPPORTED, "no such API"),
        (KeyError("key"), Verdict.ERROR, "KeyError: 'key'"),
    ],
)
def test_outcomes(judged: Callable[..., Judged], outcome: Exception | None, verdict: Verdict, reason: str) -> None:
    result = judged(outcome)
    assert (result.verdict, result.reason, result.error) == (verdict, reason, outcome)
    assert result.measured["difference"].value == 3.0
    assert result.substrate == "gloo"


def test_an_interrupt_is_no_verdict(judged: Callable[..., Judged]) -> None:
    with pytest.raises(KeyboardInterrupt):
        judged(KeyboardInterrupt())


def test_a_case_that_the_machine_cannot_judge_is_not_run(judged: Callable[..., Judged]) -> None:
    result = judged(since="2.14")
    assert (result.verdict, result.measured) == (Verdict.UNSUPPORTED, {})
    assert result.reason == "PAR-1 holds from torch 2.14 on; this is 2.13.0+cpu"


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [(ConformanceFailure("4"), Verdict.WAIVED), (None, Verdict.UNEXPECTED_PASS), (KeyError(), Verdict.ERROR)],
)
def test_waivers(judged: Callable[..., Judged], outcome: Exception | None, verdict: Verdict) -> None:
    assert judged(outcome, upper=2.0, waivers=[WAIVER]).verdict == verdict


def _fixtures_of_a_share(runs: CaseRuns, cell: Cell) -> Mapping[str, object]:
    runs.is_share = True
    return {"cell": cell}


@pytest.mark.parametrize(("outcome", "verdict"), [(ConformanceFailure("4"), Verdict.WAIVED), (None, Verdict.PASS)])
def test_a_share_of_a_sweep_need_not_show_what_is_waived(
    judged: Callable[..., Judged], monkeypatch: pytest.MonkeyPatch, outcome: Exception | None, verdict: Verdict
) -> None:
    monkeypatch.setattr(CaseRuns, "fixtures", _fixtures_of_a_share)
    assert judged(outcome, upper=2.0, waivers=[WAIVER]).verdict == verdict


@pytest.mark.parametrize(
    ("outcome", "verdict"), [(None, Verdict.QUALITY_WARNING), (ConformanceFailure("4"), Verdict.FAIL)]
)
def test_drift_is_looked_for_in_cases_that_pass(
    judged: Callable[..., Judged], outcome: Exception | None, verdict: Verdict
) -> None:
    def drift(case: str, measured: Mapping[str, Measurement]) -> tuple[Verdict, str]:
        assert (case, set(measured)) == (CASE.id, {"difference"})
        return Verdict.QUALITY_WARNING, "3 bytes, 2 before"

    assert judged(outcome, drift=drift).verdict == verdict


# Verdicts of exceptions, and the exit status of a session


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
        *(([name], 0) for name in ("pass", "quality-warning", "waived")),
        *(([name], 1) for name in ("fail", "unexpected-pass", "timeout", "crash")),
        *(([name], 5) for name in ("unsupported", "not-run")),
        (["error"], 3),
        ([], 5),
        (["unsupported", "unsupported"], 5),
        (["pass", "unsupported", "waived", "quality-warning"], 0),
        *((["pass", name], 1) for name in ("fail", "unexpected-pass", "timeout", "crash")),
        (["pass", "error"], 3),
        (["fail", "error", "crash"], 3),
        (["pass", "not-run"], 5),
        (["error", "not-run"], 5),
        *(([name, "error", "not-run"], 1) for name in ("fail", "unexpected-pass", "timeout", "crash")),
    ],
)
def test_exit_status(verdicts: list[str], status: int) -> None:
    assert exit_status({Verdict(name): verdicts.count(name) for name in verdicts}) == status


# Laws state a MUST


def test_law_states_a_must() -> None:
    @law("PAR-7", where="tp = 1", reference="https://example.org", since="2.9")
    def test_it() -> None:
        """Shards MUST
        add up.

        Wrong if not.
        """  # noqa: D205 - a MUST may take several lines

    assert law_of(test_it) == Law(
        "PAR-7", "Shards MUST add up.", "https://example.org", "2.9", REAL, scope("PAR-7", where="tp = 1")
    )
    assert law_of(test_law_states_a_must) is law_of(None) is None


@pytest.mark.parametrize("docstring", [None, "Shards must add up.", "Shards add up.\n\nThey MUST."])
def test_law_without_a_must_is_refused(docstring: str | None) -> None:
    def test_it() -> None:
        pass

    test_it.__doc__ = docstring
    with pytest.raises(ValueError, match=r"law PAR-7: .* test_it's docstring must say what MUST hold"):
        law("PAR-7", where="tp = 1", reference="")(test_it)


# Support by a version of torch and a machine

PIPELINED = Cell(mesh="pp2-dp2", model="cut", accumulation=4, pipeline="1f1b")
ZERO_BUBBLE = PIPELINED.but(pipeline="zbv-zero-bubble")
ON_SIMULATED = Hardware(simulated=SimulatedDevice(schedule="lazy", library="/cache/simdev.so"))


@pytest.mark.parametrize(
    ("torch_version", "hardware", "cell", "reason"),
    [
        # Gloo refuses the metadata that stages of older versions exchange before their first step.
        ("2.9.1", Hardware(), PIPELINED, "pipelines are judged from 2.10 on"),
        ("2.10.0", Hardware(), PIPELINED, None),
        ("2.11.0", Hardware(), ZERO_BUBBLE, "the stages of one rank send to each other, which gloo cannot do"),
        ("2.13.0", Hardware(), ZERO_BUBBLE, None),
        ("2.11.0", Hardware(), ZERO_BUBBLE.but(pipeline="interleaved-zero-bubble"), None),
        # From https://github.com/pytorch/pytorch/pull/177728 to https://github.com/pytorch/pytorch/pull/180512.
        ("2.11.0", ON_SIMULATED, PIPELINED, None),
        ("2.12.1", ON_SIMULATED, PIPELINED, "forks CUDA's generators"),
        ("2.13.0", ON_SIMULATED, PIPELINED, None),
    ],
)
def test_pipelines_by_version(torch_version: str, hardware: Hardware, cell: Cell, reason: str | None) -> None:
    machine = Machine(hardware=hardware, torch_version=torch_version, max_world_size=8)
    found = unsupported(asserted_laws()["PP-1"].law, cell, machine)
    assert (reason in found) if reason and found else found == reason


def test_the_run_that_saves_needs_its_ranks_too() -> None:
    """A cell that two devices can run resumes a checkpoint of a larger mesh."""
    resumed = Cell(mesh="dp2", saved_on="hsdp2x2", steps=4)
    devices = Hardware(devices=some_devices(2), ranks_per_device=1, nccl=(2, 27, 3))
    resuming = asserted_laws()["CKPT-1"].law
    on_devices = replace(resuming, substrates=("nccl",))
    machine = Machine(hardware=devices, torch_version="2.13.0", max_world_size=8)
    assert unsupported(on_devices, resumed, machine) == "needs 4 GPUs (nccl); 2 found"
    assert unsupported(on_devices, resumed.but(saved_on="tp2"), machine) is None
    small = Machine(hardware=Hardware(), torch_version="2.13.0", max_world_size=2)
    assert unsupported(resuming, resumed, small) == "needs 4 ranks; gloo runs at most 2 here"
    assert unsupported(resuming, resumed.but(saved_on="tp2"), small) is None
