"""Detection power: every defect is caught by the laws that it names, and benign changes pass."""

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest

import conformance.instruments.poison  # noqa: F401
import reference_trainer.checkpoint  # noqa: F401 - so that all that a defect may replace is loaded
from conformance.cli.describe import law_tests
from conformance.defects.catalogue import AND, TWIN, defects, ids, injected, sources_of
from conformance.defects.injection import Defect, NotInjectable, replaced
from conformance.defects.shown_by import SHOWN_BY
from conformance.detection.bench import Bench
from conformance.detection.trials import escapes
from conformance.judge.verdicts import Verdict, classify
from conformance.oracles import dtype_policy as dtype_policies
from conformance.oracles.dtype_policy import BF16, FP32, dtype_policy
from conformance.outcomes import CellFailed
from conformance.plan.cells import Cell
from conformance.run.case_runs import CaseRuns
from conformance.run.pool import Pools
from tests.pytest_plugin import miniatures


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Pools() as pools:
        yield Bench(tmp_path_factory.mktemp("records"), pools)


def by_id(defect: Defect) -> str:
    return defect.id


SHOWN_HERE = [defect for defect in defects() if "gloo" in defect.substrates]


def test_every_defect_has_its_cells_here() -> None:
    assert SHOWN_BY.keys() == {defect.id for defect in SHOWN_HERE}, "name the cells that show it in SHOWN_BY"


def laws_shown_by(selection: str) -> set[str]:
    return {law for defect in SHOWN_HERE if SHOWN_BY[defect.id] == selection for law in defect.laws}


def enough() -> list[str]:
    """Cells on which every law is to let benign changes pass: those first that show the most laws that are left."""
    selections = sorted(set(SHOWN_BY.values()))
    left = set().union(*(laws_shown_by(selection) for selection in selections))
    chosen = []
    while left:
        chosen.append(max(selections, key=lambda one: len(laws_shown_by(one) & left)))
        left -= laws_shown_by(chosen[-1])
    return chosen


@pytest.mark.parametrize("selection", enough())
def test_benign_changes_pass(bench: Bench, selection: str) -> None:
    """The twins of all defects that these cells show, in force at once, and all laws that these defects must fail.

    `conformance defects` judges each twin, and alone. Those that change one place hide each other: they take turns.
    The twin of a hang may issue collectives of its own, which only the laws that it names let pass.
    """
    shown = {f"{defect.id}{TWIN}": defect for defect in SHOWN_HERE if SHOWN_BY[defect.id] == selection}
    alone = [[name] for name, defect in shown.items() if defect.hangs]
    for twins in apart([name for name, defect in shown.items() if not defect.hangs]) + alone:
        named = {law for name in twins for law in shown[name].laws}
        found = bench.judge(bench.cases(selection, only=named), defect=AND.join(twins))
        assert found
        assert [judged for judged in found if judged.verdict != Verdict.PASS] == []


def apart(names: Sequence[str]) -> list[list[str]]:
    """As few groups as come easily, in none of which two change the same place."""
    groups: list[tuple[list[str], set[str]]] = []
    before = snapshot()
    for name in names:
        with injected(name):
            places = {place for place, value in snapshot().items() if value != before.get(place)}
        group = next((group for group in groups if not group[1] & places), None)
        if group is None:
            groups.append(([name], places))
        else:
            group[0].append(name)
            group[1].update(places)
    return [group for group, _ in groups]


# After the twins, since processes that other defects were in serve all, see `try_defect`.
@pytest.mark.parametrize("defect", SHOWN_HERE, ids=by_id)
def test_a_defect_is_caught_by_its_laws(bench: Bench, defect: Defect) -> None:
    assert escapes(bench, defect) == []


def test_the_other_meaning_of_an_unset_reduce_dtype_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this torch were on the other side of 2.15, where it has changed."""
    policy = dtype_policy("bf16-params")
    other = dataclasses.replace(policy, reduce=BF16 if policy.reduce == FP32 else FP32)
    monkeypatch.setitem(dtype_policies._POLICIES, "bf16-params", other)
    found = bench.judge(bench.cases("id = dp2-bf16params-default-meta"), defect=None)
    assert {judged.case.law for judged in found if judged.verdict == Verdict.FAIL} >= {"PAR-2", "MP-1", "MP-4"}


@pytest.mark.parametrize(
    ("version", "dtype"), [("2.6.0", BF16), ("2.13.0+cpu", BF16), ("2.14.1", BF16), ("2.15.0", FP32)]
)
def test_an_unset_reduce_dtype_by_version(version: str, dtype: str) -> None:
    assert dtype_policies._unset_reduce_dtype(version) == dtype


@pytest.mark.parametrize("defect", defects(), ids=by_id)
def test_an_entry_is_complete(defect: Defect) -> None:
    assert defect.id == defect.id.lower().strip()
    assert defect.title
    assert defect.mechanism
    assert defect.source.startswith("https://")
    assert defect.laws
    assert set(defect.laws) <= law_tests().keys()
    assert sources_of(defect)


def test_ids_are_unique_and_have_twins() -> None:
    assert len(set(ids())) == len(ids()) == 2 * len(defects())


@pytest.mark.parametrize("name", ids())
def test_injection_is_undone(name: str) -> None:
    """Also after an error."""
    before = snapshot()

    def fail_inside() -> None:
        with injected(name):
            assert snapshot() != before, "nothing was injected"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert snapshot() == before


def snapshot() -> dict[str, int]:
    """Identity of all that lives in the modules that defects replace names of, and in their classes."""

    def members(prefix: str, owner: ModuleType | type) -> Iterator[tuple[str, int]]:
        for name, value in vars(owner).items():
            yield f"{prefix}.{name}", id(value)
            of_it = issubclass(type(value), type) and owner.__name__.startswith(value.__module__)  # or of its package
            if isinstance(owner, ModuleType) and of_it:
                yield from members(f"{prefix}.{name}", value)

    torch_modules = ("fsdp.", "tensor.", "checkpoint.", "_functional_collectives")
    prefixes = ("reference_trainer.", "torch.nn.utils.", *(f"torch.distributed.{name}" for name in torch_modules))
    others = ("torch", "torch.distributed", "torch.nn.init", "psutil", "conformance.instruments.poison")
    modules = {name: module for name, module in sys.modules.items() if name.startswith(prefixes) or name in others}
    return {key: number for name, module in modules.items() for key, number in members(name, module)}


def test_nothing_is_injected_without_a_name() -> None:
    before = snapshot()
    with injected(None):
        assert snapshot() == before


@pytest.mark.parametrize("name", ["nonsense", "nonsense.twin", "grads-summed.twin.twin", ""])
def test_an_unknown_id_is_an_error(name: str) -> None:
    with pytest.raises(NotInjectable, match="KeyError"), injected(name):
        pytest.fail("never reached")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("torch.distributed.fsdp.nowhere", "x"),
        ("torch.distributed.fsdp", "nothing"),
        ("torch.distributed.fsdp:NoClass", "reshard"),
        ("torch.distributed.fsdp:FSDPModule", "nothing"),
    ],
)
def test_a_defect_whose_place_is_gone_is_an_error(owner: str, name: str) -> None:
    """Not a pass: it would prove nothing."""
    with (
        pytest.raises(NotInjectable, match=f"{owner} has no {name}: "),
        replaced(owner, name, lambda original: original),
    ):
        pytest.fail("never reached")


def test_a_defect_that_cannot_be_injected_is_the_suites_error(bench: Bench) -> None:
    found = bench.judge(bench.cases("id = dp2-fp32-default-meta-sgd"), defect="nonsense")
    assert len(found) == 2
    for judged in found:
        assert judged.verdict == Verdict.ERROR
        assert judged.reason.endswith("NotInjectable: nonsense cannot be injected: KeyError: 'nonsense'")


def test_a_rank_that_hangs_is_told_from_its_waiting_peers(bench: Bench) -> None:
    limit_s = 6.0
    cell, defect = Cell(mesh="dp2", seed=1), f"{miniatures.__file__}:suspended"
    with pytest.raises(CellFailed) as caught:
        CaseRuns(bench.store(defect=defect, deadline_s=limit_s)).run(cell)
    failure = caught.value.failure
    assert (failure.kind, failure.first_rank) == ("timeout", 1)
    assert failure.reason == f"no result from ranks 0, 1 within {limit_s:g} s; rank 1 did not wait for a peer"
    assert classify(caught.value)[0] == Verdict.TIMEOUT
    with pytest.raises(CellFailed, match="no result"):
        CaseRuns(bench.store(defect=defect)).run(cell)  # a hang is not repeated for the next law
