"""ENV laws on facts of a healthy world, and on the same facts with one fault: each precondition can fail."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from conformance.experiments.environment import RankEnvironment, probe
from conformance.laws.preconditions import test_env as laws
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell
from conformance.run.case_runs import CaseRuns
from conformance.run.store import RecordStore

Facts = list[RankEnvironment]
COLLECTIVES = laws.test_collectives_are_exact_in_every_dtype
SOFTWARE = laws.test_ranks_run_the_same_software_in_the_same_state
MACHINE = laws.test_machine_has_memory_and_one_clock


@pytest.fixture(scope="module")
def healthy(store: RecordStore) -> Facts:
    return CaseRuns(store).measure(probe, Cell(mesh="dp2"))


def double(facts: Facts, dtype: str, collective: str) -> None:
    facts[1].collectives[dtype][collective] = [2 * x for x in facts[1].collectives[dtype][collective]]


def change(facts: Facts, **values: object) -> None:
    for name, value in values.items():
        setattr(facts[1], name, value)


@pytest.mark.parametrize(
    ("law", "harm", "message"),
    [
        (COLLECTIVES, lambda facts: double(facts, "bfloat16", "all_reduce"), "rank 1, bfloat16"),
        (COLLECTIVES, lambda facts: double(facts, "int64", "broadcast"), "rank 1, int64"),
        (SOFTWARE, lambda facts: change(facts, torch="2.0"), "torch differs between ranks"),
        (SOFTWARE, lambda facts: change(facts, threads=7), "threads differs between ranks"),
        (SOFTWARE, lambda facts: change(facts, pid=facts[0].pid), "processes: measured 1, expected 2"),
        (MACHINE, lambda facts: change(facts, available_memory_bytes=5), "5 bytes of memory available"),
        (MACHINE, lambda facts: change(facts, monotonic_s=facts[0].monotonic_s + 60), "60.0 s apart"),
    ],
)
def test_a_precondition_fails(
    healthy: Facts, law: Callable[..., None], harm: Callable[[Facts], None], message: str
) -> None:
    facts = copy.deepcopy(healthy)
    harm(facts)
    with pytest.raises(AssertionError, match=message):
        law(lambda _experiment, _cell: facts, Cell())


class Ran:
    """Record of a run whose ranks have handed these operands to operators."""

    def __init__(self, *ranks: list[str], device_type: str = "cpu") -> None:
        self.device_type = device_type
        self.ranks = [SimpleNamespace(operands=operands) for operands in ranks]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([["a", "b"], ["b", "c"]], r"operands in the run alone: measured 1, expected 0 operands, of 2; c"),
        ([["a"], ["a"]], r"operands in the emulation alone: measured 1, expected 0 operands, of 2; b"),
    ],
)
def test_other_operands_than_those_of_the_emulation_fail(
    ranks: list[list[str]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(laws, "operands_of_emulation", lambda _: {"a", "b"})
    law = laws.test_emulation_has_the_operands_of_the_run
    law(lambda _: Ran(["a"], ["b"]), Cell())  # type: ignore[arg-type]
    with pytest.raises(ConformanceFailure, match=message):
        law(lambda _: Ran(*ranks), Cell())  # type: ignore[arg-type]


def test_fused_attentions_are_one_kernel_on_the_simulated_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu, on_cuda = (
        f"aten::_scaled_dot_product_{name}(a)" for name in ("flash_attention_for_cpu", "flash_attention")
    )
    monkeypatch.setattr(laws, "operands_of_emulation", lambda _: {on_cpu})
    law = laws.test_emulation_has_the_operands_of_the_run
    law(lambda _: Ran([on_cuda], device_type="sim"), Cell())  # type: ignore[arg-type]
    with pytest.raises(ConformanceFailure, match="operands in the run alone: measured 1"):
        law(lambda _: Ran([on_cuda], device_type="cuda"), Cell())  # type: ignore[arg-type]


def test_an_emulation_of_which_nothing_is_seen_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(laws, "operands_of_emulation", lambda _: set())
    with pytest.raises(RuntimeError, match="has handed nothing to operators"):
        laws.test_emulation_has_the_operands_of_the_run(lambda _: Ran([]), Cell())  # type: ignore[arg-type]
