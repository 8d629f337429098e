"""Detection power: every defect is caught by the laws that it names, and its benign twin passes them."""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import pytest

import conformance.instruments.poison  # noqa: F401
import reference_trainer.checkpoint  # noqa: F401 - so that all that a defect may replace is loaded
from conformance.defects.catalogue import AND, TWIN, defects, ids, injected, sources_of, subjects_of
from conformance.defects.injection import Defect, NotInjectable, repeated_call, replaced, replaced_call
from conformance.detection.case_judge import CaseJudge, simulated_device, the_matrix
from conformance.detection.trials import escapes, hardware_for, passes
from conformance.judge.verdicts import Verdict, classify
from conformance.laws.registry import law_tests
from conformance.oracles import dtype_policy as dtype_policies
from conformance.oracles.dtype_policy import BF16, FP32, dtype_policy
from conformance.outcomes import CellFailed
from conformance.plan.cells import Cell
from conformance.plan.selection import parse
from conformance.run.case_runs import CaseRuns
from conformance.run.devices.hardware import NO_DEVICES
from conformance.run.pool import Pools
from tests.pytest_plugin import miniatures


@pytest.fixture(scope="module")
def case_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseJudge]:
    with Pools() as pools:
        yield CaseJudge(tmp_path_factory.mktemp("records"), pools)


def by_id(defect: Defect) -> str:
    return defect.id


SHOWN_ON_CPU = [defect for defect in defects() if "gloo" in defect.substrates]
NEEDS_SIMULATED_DEVICE = [
    (defect, law) for defect in defects() for law in defect.laws if hardware_for(defect, law) != NO_DEVICES
]
"""Defects, and the laws that catch them on the simulated device alone."""


def test_what_needs_the_simulated_device() -> None:
    assert {law for _, law in NEEDS_SIMULATED_DEVICE} == {"STREAM-2", "STREAM-4", "STREAM-5", "STREAM-6", "MEM-10"}
    assert all(defect.cells for defect in defects())


def test_smoke_has_a_case_for_nine_of_ten_defects() -> None:
    matrix = the_matrix()
    of_smoke = [
        defect
        for defect in SHOWN_ON_CPU
        if {case.law for case in matrix.cases("smoke", only=parse(defect.cells))} & set(defect.laws)
    ]
    assert len(of_smoke) >= 0.9 * len(SHOWN_ON_CPU)


@pytest.mark.parametrize("defect", SHOWN_ON_CPU, ids=by_id)
def test_pr_has_a_case_for_each_defect_and_the_matrix_one_for_each_law(defect: Defect) -> None:
    matrix, selection = the_matrix(), parse(defect.cells)
    assert {case.law for case in matrix.cases("pr", only=selection)} & set(defect.laws)
    assert {case.law for case in matrix.cases("nightly", only=selection)} >= set(defect.laws)
    # Only ids have so many dashes.
    assert set(re.findall(r"[a-z0-9.]+(?:-[a-z0-9.]+){3,}", defect.cells)) <= the_matrix().cells.keys()


def laws_to_fail(selection: str) -> set[str]:
    """Return the laws that the defects of these cells must fail without a device."""
    chosen = [defect for defect in SHOWN_ON_CPU if defect.cells == selection]
    return {law for defect in chosen for law in defect.laws if hardware_for(defect, law) == NO_DEVICES}


def selections_for_all_laws() -> list[str]:
    """Return few selections that show a defect to every law, chosen greedily: first the one that adds most laws."""
    selections = sorted({defect.cells for defect in SHOWN_ON_CPU})
    missing = set().union(*map(laws_to_fail, selections))
    chosen = []
    while missing:
        chosen.append(max(selections, key=lambda selection: len(laws_to_fail(selection) & missing)))
        missing -= laws_to_fail(chosen[-1])
    return chosen


@pytest.mark.parametrize("selection", selections_for_all_laws())
def test_benign_twins_pass(case_judge: CaseJudge, selection: str) -> None:
    """The twins of all defects of these cells, in force at once, pass all laws that these defects must fail.

    `conformance defects` judges each twin alone. Twins that replace the same attribute hide each other, and take turns.
    The twin of a hang may issue collectives of its own, which only the laws that it names let pass.
    """
    twins = {f"{defect.id}{TWIN}": defect for defect in SHOWN_ON_CPU if defect.cells == selection}
    of_hangs = [[name] for name, defect in twins.items() if defect.hangs]
    for group in without_common_attributes([name for name, defect in twins.items() if not defect.hangs]) + of_hangs:
        laws = laws_to_fail(selection) & {law for name in group for law in twins[name].laws}
        results = case_judge.judge(case_judge.cases(selection, only=laws), defect=AND.join(group))
        assert results
        assert [judged for judged in results if not passes(judged, *(twins[name] for name in group))] == []


def without_common_attributes(names: Sequence[str]) -> list[list[str]]:
    """Return groups of defects, chosen greedily, in none of which two defects replace the same attribute."""
    groups: list[tuple[list[str], set[str]]] = []
    for name in names:
        changed = changed_by(name)
        group = next((group for group in groups if not group[1] & changed), None)
        if group is None:
            groups.append(([name], {*changed}))
        else:
            group[0].append(name)
            group[1].update(changed)
    return [group for group, _ in groups]


@pytest.mark.parametrize("defect", {defect.id: defect for defect, _ in NEEDS_SIMULATED_DEVICE}.values(), ids=by_id)
def test_a_twin_passes_on_the_simulated_device(case_judge: CaseJudge, defect: Defect) -> None:
    laws = [law for of, law in NEEDS_SIMULATED_DEVICE if of is defect]
    hardware = simulated_device()
    if hardware is None:
        assert {hardware_for(defect, law) for law in laws} == {None}
        return
    judge = dataclasses.replace(case_judge, hardware=hardware)
    results = judge.judge(judge.cases_of(defect.cells, laws), defect=f"{defect.id}{TWIN}")
    assert {judged.case.law for judged in results} == set(laws)
    assert {(judged.verdict, judged.reason) for judged in results} == {(Verdict.PASS, "")}


# After the twins, since rank processes that other defects were in serve all tests, see `try_defect`.
@pytest.mark.parametrize("defect", defects(), ids=by_id)
def test_a_defect_is_caught_by_its_laws(case_judge: CaseJudge, defect: Defect) -> None:
    assert escapes(case_judge, defect) == []


def test_the_other_meaning_of_an_unset_reduce_dtype_is_caught(
    case_judge: CaseJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is that of a torch on the other side of 2.15, where the meaning has changed."""
    policy = dtype_policy("bf16-params")
    other = dataclasses.replace(policy, reduce=BF16 if policy.reduce == FP32 else FP32)
    monkeypatch.setitem(dtype_policies._POLICIES, "bf16-params", other)
    laws = ["PAR-2", "MP-1", "MP-4"]
    cells = "mesh = dp2 and precision = bf16-params"
    results = case_judge.judge(case_judge.cases(cells, only=laws), defect=None)
    assert {(judged.case.law, judged.verdict) for judged in results} == {(law, Verdict.FAIL) for law in laws}


@pytest.mark.parametrize(
    ("version", "dtype"), [("2.6.0", BF16), ("2.13.0+cpu", BF16), ("2.14.1", BF16), ("2.15.0", FP32)]
)
def test_an_unset_reduce_dtype_by_version(version: str, dtype: str) -> None:
    assert dtype_policies.unset_reduce_dtype(version) == dtype


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
    """All replaced attributes are restored, also after an error."""
    assert changed_by(name), "nothing was injected"
    before = snapshot()

    def fail_inside() -> None:
        with injected(name):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert snapshot() == before


@cache
def changed_by(name: str) -> frozenset[str]:
    """Return the attributes that an injection replaces."""
    with injected(name):
        # What the injection imports is imported before the snapshot without it.
        pass
    before = snapshot()
    with injected(name):
        return frozenset(attribute for attribute, value in snapshot().items() if value != before.get(attribute))


def snapshot() -> dict[str, int]:
    """Return the identity of each attribute of the modules that defects change, and of the classes in them."""

    def members(prefix: str, owner: ModuleType | type) -> Iterator[tuple[str, int]]:
        for name, value in vars(owner).items():
            yield f"{prefix}.{name}", id(value)
            # A class of the module or of its package.
            is_own_class = issubclass(type(value), type) and owner.__name__.startswith(value.__module__)
            if isinstance(owner, ModuleType) and is_own_class:
                yield from members(f"{prefix}.{name}", value)

    distributed = ("fsdp", "tensor.", "checkpoint.", "_functional_collectives", "pipelining")
    torch_modules = ("nn.utils.", "optim.", *(f"distributed.{name}" for name in distributed))
    prefixes = ("reference_trainer.", *(f"torch.{name}" for name in torch_modules))
    others = (
        "torch",
        "torch.autograd",
        "torch.distributed",
        "torch.nn.functional",
        "torch.nn.init",
        "psutil",
        "conformance.instruments.poison",
    )
    modules = {name: module for name, module in sys.modules.items() if name.startswith(prefixes) or name in others}
    return {attribute: identity for name, module in modules.items() for attribute, identity in members(name, module)}


def test_nothing_is_injected_without_a_name() -> None:
    before = snapshot()
    with injected(None):
        assert snapshot() == before


def test_sweeps_are_restricted_to_the_subjects_that_show_defects() -> None:
    assert subjects_of("mean-of-own-shard") == subjects_of("mean-of-own-shard.twin") == {"mean of squares"}
    assert subjects_of("mean-of-own-shard+grads-summed+muon-of-own-shard") == {"mean of squares", "Muon"}
    assert subjects_of("grads-summed") == subjects_of(None) == frozenset()
    sweeps = {"DT-3", "OPT-3", "API-3", "TP-1", "TP-2"}
    assert [defect.id for defect in defects() if sweeps & {*defect.laws} and not defect.subjects] == []


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
def test_a_defect_whose_attribute_is_gone_is_an_error(owner: str, name: str) -> None:
    """A pass would prove nothing."""
    with (
        pytest.raises(NotInjectable, match=f"{owner} has no {name}: "),
        replaced(owner, name, lambda original: original),
    ):
        pytest.fail("never reached")


class Counter:
    def add(self, number: int, *, times: int = 1) -> int:
        return number * times


COUNTER = f"{__name__}:Counter"


def test_replaced_call_is_given_the_original_and_all_arguments() -> None:
    def add(original: Callable[..., int], counter: Counter, number: int, *, times: int) -> int:
        return 100 * original(counter, number, times=times)

    with replaced_call(COUNTER, "add", add):
        assert Counter().add(2, times=3) == 600
    assert Counter().add(2, times=3) == 6


@pytest.mark.parametrize(("times", "result"), [(0, None), (1, 6), (2, 6)])
def test_repeated_call_calls_the_original_as_often_as_it_is_told(times: int, result: int | None) -> None:
    calls = []

    def add(original: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    with replaced_call(COUNTER, "add", add), repeated_call(COUNTER, "add", times=times):
        assert Counter().add(2, times=3) == result
    assert len(calls) == times


def test_a_defect_that_cannot_be_injected_is_the_suites_error(case_judge: CaseJudge) -> None:
    cases = case_judge.cases("id = dp2-fp32-default-meta-sgd", only=["INIT-1", "PAR-1", "CLIP-1"])
    results = case_judge.judge(cases, defect="nonsense")
    assert len(results) == len(cases) == 3
    for judged in results:
        assert judged.verdict == Verdict.ERROR
        assert judged.reason.endswith("NotInjectable: nonsense cannot be injected: KeyError: 'nonsense'")


def test_a_rank_that_hangs_is_told_from_its_waiting_peers(case_judge: CaseJudge) -> None:
    limit_s = 6.0
    cell, defect = Cell(mesh="dp2", seed=1), f"{miniatures.__file__}:suspended"
    with pytest.raises(CellFailed) as caught:
        CaseRuns(case_judge.store(defect=defect, deadline_s=limit_s)).run(cell)
    failure = caught.value.failure
    assert (failure.kind, failure.first_rank) == ("timeout", 1)
    assert failure.reason == f"no result from ranks 0, 1 within {limit_s:g} s; rank 1 did not wait for a peer"
    assert classify(caught.value)[0] == Verdict.TIMEOUT
    with pytest.raises(CellFailed, match="no result"):
        CaseRuns(case_judge.store(defect=defect)).run(cell)  # a hang is not repeated for the next law
