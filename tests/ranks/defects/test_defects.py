"""Detection power: every defect is caught by the laws that it names, and its benign twin passes them."""

import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

import conformance.instruments.poison  # noqa: F401
import reference_trainer.checkpoint  # noqa: F401 - so that all that a defect may replace is loaded
from conformance.defects.catalogue import defects, ids, injected, subjects_of
from conformance.defects.injection import Defect, NotInjectable, replaced
from conformance.detection.case_judge import CaseJudge, the_matrix
from conformance.detection.trials import cases_by_judge, cheapest_first, escapes, hardware_for
from conformance.judge.law import law_of
from conformance.judge.registry import law_tests
from conformance.judge.verdicts import Verdict, classify
from conformance.oracles import dtype_policy as dtype_policies
from conformance.oracles.dtype_policy import BF16, FP32, dtype_policy
from conformance.outcomes import CellFailed
from conformance.plan.cells import Cell
from conformance.plan.content import compiled
from conformance.plan.matrix import Case
from conformance.plan.substrates import CUDA
from conformance.run.case_runs import CaseRuns
from conformance.run.devices.hardware import NO_DEVICES, Hardware
from conformance.run.pool import Pools
from tests.support import miniatures
from tests.support.sweep_shares import lost_in_shares


@pytest.fixture(scope="module")
def case_judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseJudge]:
    with Pools() as pools:
        yield CaseJudge(tmp_path_factory.mktemp("records"), pools)


def by_id(defect: Defect) -> str:
    return defect.id


def laws_here(defect: Defect) -> set[str]:
    """Return the laws that can catch a defect on this machine."""
    return {law for law in defect.laws if hardware_for(defect, law) is not None}


class Shown(NamedTuple):
    """First run that `escapes` judges by a law."""

    cell: Cell
    hardware: Hardware

    @property
    def cost(self) -> int:
        """Work of all ranks, in layers of a model on a processor; on the simulated device each takes thrice as long."""
        return self.cell.world_size * self.cell.config.model.n_layers * (1 if self.hardware == NO_DEVICES else 3)


def shown(defect: Defect) -> dict[str, Shown]:
    """Return the first run that shows a defect to each law that can catch it on this machine."""
    first = dict[str, Shown]()
    for judge, cases in cases_by_judge(CaseJudge(Path(), Pools()), defect):
        for case in cheapest_first(cases):
            first.setdefault(case.law, Shown(case.cell, judge.hardware))
    return first


def one_per_law() -> list[Defect]:
    """Return defects that together make each law fail that any defect makes fail here, each with its part of the laws.

    A greedy set cover (https://doi.org/10.1287/moor.4.3.233): next comes the defect with most new laws for its cost.
    The job `detection` tries all defects, with all of their laws and their twins.
    """
    candidates = [(defect, shown(defect)) for defect in defects()]
    missing = set().union(*map(laws_here, defects()))
    chosen = []
    while missing:
        defect, runs = max(candidates, key=lambda each: gain(each[1], missing))
        assert missing & runs.keys(), f"no cell shows a defect to {missing}"
        chosen.append(
            dataclasses.replace(defect, laws=tuple(law for law in defect.laws if law in runs.keys() & missing))
        )
        missing -= runs.keys()
    return chosen


def gain(runs: dict[str, Shown], missing: set[str]) -> float:
    """Return the number of missing laws for the cost of their runs."""
    new = missing & runs.keys()
    return len(new) / sum(run.cost for run in {runs[law] for law in new}) if new else 0.0


@pytest.mark.parametrize("defect", one_per_law(), ids=by_id)
def test_a_defect_is_caught_by_its_laws(case_judge: CaseJudge, defect: Defect) -> None:
    assert escapes(case_judge, defect) == []


def test_every_law_that_holds_without_a_device_catches_a_defect() -> None:
    """Laws of any trainer are proven by wrong trainers, see tests/nightly/subjects/test_wrong_subjects.py."""
    caught = {law for defect in defects() if defect.of == "reference trainer" for law in defect.laws}
    laws = [law for test in law_tests().values() if (law := law_of(test))]
    others = {law.id for law in laws if law.scope.of != "reference trainer"}
    own = {law.id for law in laws if law.scope.of == "reference trainer" and not {*law.substrates} <= {*CUDA}}
    assert own == caught - others


def test_what_needs_the_simulated_device() -> None:
    needs = {law for defect in defects() for law in defect.laws if hardware_for(defect, law) != NO_DEVICES}
    any_trainer = {"unordered-accesses", "schedules-agree", "memory-of-streams"}
    assert needs == {"STREAM-2", "STREAM-4", "STREAM-5", "STREAM-6", "STREAM-7", "MEM-10"} | any_trainer


def test_profiles_have_cases_for_defects_that_processors_show() -> None:
    """Profile pr has one for each defect, and nightly for each law of it; smoke has one for nine defects of ten.

    Of these, shares of sweeps miss some, see `tests.support.sweep_shares`.
    """
    matrix = the_matrix()
    laws_by_cell = {
        profile: {cell: matrix.laws_in(profile, cell) for cell in matrix.profile_cells(profile)}
        for profile in ("smoke", "pr", "nightly")
    }
    shown = [defect for defect in defects() if "gloo" in defect.substrates and defect.of == "reference trainer"]
    in_smoke, missed = 0, lost_in_shares()
    assert {*missed} <= {defect.id for defect in shown}
    for defect in shown:
        holds = compiled(defect.cells)
        laws = {
            profile: {law for cell, judging in cells.items() if holds(cell) for law in judging}
            for profile, cells in laws_by_cell.items()
        }
        in_smoke += bool(laws["smoke"] & {*defect.laws}) and defect.id not in missed
        assert laws["pr"] & {*defect.laws}, defect.id
        assert laws["nightly"] >= {*defect.laws}, defect.id
        # Only ids have so many dashes.
        assert {*re.findall(r"[a-z0-9.]+(?:-[a-z0-9.]+){3,}", defect.cells)} <= matrix.cells.keys(), defect.id
    assert in_smoke >= 0.9 * len(shown)


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


def test_entries_are_complete() -> None:
    for defect in defects():
        assert defect.id == defect.id.lower().strip()
        assert re.fullmatch(r"\S.{20,}\.", defect.why), defect.id
        assert defect.source.startswith("https://"), defect.id
        assert defect.cells, defect.id
        assert defect.laws, defect.id
        assert {*defect.laws} <= law_tests().keys(), defect.id


def test_ids_are_unique_and_have_twins() -> None:
    assert len(set(ids())) == len(ids()) == 2 * len(defects())


def test_injections_are_undone() -> None:
    """All replaced attributes are restored, also after an error."""

    def fail_inside(name: str) -> None:
        with injected(name):
            raise ZeroDivisionError

    for name in ids():
        with injected(name):
            # Imports of the injection come before the snapshot.
            pass
    owners = replaceable()
    before = snapshot(owners)
    with injected(None):
        assert snapshot(owners) == before
    for first in range(0, len(ids()), some := 40):  # a snapshot takes longer than an injection
        names = ids()[first : first + some]
        for name in names:
            with pytest.raises(ZeroDivisionError):
                fail_inside(name)
        assert snapshot(owners) == before, f"one of {names}"
    assert replaceable().keys() == owners.keys()


def snapshot(owners: dict[str, ModuleType | type]) -> dict[str, dict[str, int]]:
    """Return the identity of each attribute of modules and classes."""
    return {name: dict(zip(vars(owner), map(id, vars(owner).values()), strict=True)) for name, owner in owners.items()}


def replaceable() -> dict[str, ModuleType | type]:
    """Return the modules whose attributes defects change, and the classes in them, by name."""

    def classes(prefix: str, module: ModuleType) -> Iterator[tuple[str, type]]:
        for name, value in vars(module).items():
            # A class of the module or of its package.
            if issubclass(type(value), type) and module.__name__.startswith(value.__module__):
                yield f"{prefix}.{name}", value

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
    return modules | dict(pair for name, module in modules.items() for pair in classes(name, module))


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


def test_a_defect_that_cannot_be_injected_is_the_suites_error(case_judge: CaseJudge) -> None:
    cases = case_judge.cases("id = dp2-fp32-default-meta-sgd", only=["INIT-1", "PAR-1", "CLIP-1"])
    results = case_judge.judge(cases, defect="nonsense")
    assert len(results) == len(cases) == 3
    for judged in results:
        assert judged.verdict == Verdict.ERROR
        assert judged.reason.endswith("NotInjectable: nonsense cannot be injected: KeyError: 'nonsense'")


def test_a_rank_that_hangs_is_told_from_its_waiting_peers(case_judge: CaseJudge) -> None:
    limit_s = 3.0
    cell, defect = Cell(mesh="dp2", seed=1), f"{miniatures.__file__}:suspended"
    with pytest.raises(CellFailed) as caught:
        CaseRuns(case_judge.store(defect=defect, deadline_s=limit_s)).run(cell)
    failure = caught.value.failure
    assert (failure.kind, failure.first_rank) == ("timeout", 1)
    assert failure.reason == f"no result from ranks 0, 1 within {limit_s:g} s; rank 1 did not wait for a peer"
    assert classify(caught.value)[0] == Verdict.TIMEOUT
    with pytest.raises(CellFailed, match="no result"):
        CaseRuns(case_judge.store(defect=defect)).run(cell)  # a hang is not repeated for the next law


def test_gradients_that_zero_bubble_loses_are_missed(case_judge: CaseJudge) -> None:
    """PAR-1 sees torch's fault (findings/zero_bubble_loses_gradients.py), which the trainer refuses to run into."""
    cell = Cell(mesh="pp2-dp2", model="cut", accumulation=4, pipeline="interleaved-zero-bubble")
    (judged,) = case_judge.judge([Case("PAR-1", cell)], defect="pipeline-gathered-each-micro-batch")
    assert judged.verdict == Verdict.FAIL
    assert "missing" in judged.reason


# Faults of buffers that only a device shows: here they reach their targets


class Stream:
    """Record of the events that a stream waits for."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


def after_backward(monkeypatch: pytest.MonkeyPatch, name: str, *, offloaded: bool) -> tuple[bool, list[str]]:
    """Return whether a group keeps the buffer of its all-reduce, and the events that backward's stream waits for."""
    monkeypatch.setattr(fsdp.FSDPParamGroup, "post_backward", lambda _group: None)
    stream = Stream()
    group: Any = SimpleNamespace(
        _all_reduce_state="state",
        _post_reduce_event="reduced",
        fsdp_params=[SimpleNamespace(offload_to_cpu=offloaded)],
        device_handle=SimpleNamespace(current_stream=lambda: stream),
    )
    with injected(name):
        fsdp.FSDPParamGroup.post_backward(group)
    return group._all_reduce_state is not None, stream.waited


@pytest.mark.parametrize(
    ("name", "offloaded"), {"all-reduce-buffer-released": False, "offload-source-released": True}.items()
)
def test_a_buffer_is_dropped_early_or_after_a_wait(monkeypatch: pytest.MonkeyPatch, name: str, offloaded: bool) -> None:
    assert after_backward(monkeypatch, name, offloaded=offloaded) == (False, [])
    assert after_backward(monkeypatch, f"{name}.twin", offloaded=offloaded) == (False, ["reduced"])
    assert after_backward(monkeypatch, name, offloaded=not offloaded) == (True, [])


@pytest.mark.parametrize(("suffix", "waits"), [("", 0), (".twin", 2)])
def test_the_event_of_a_copy_is_forgotten_or_waited_for_twice(
    monkeypatch: pytest.MonkeyPatch, suffix: str, waits: int
) -> None:
    waited = []
    event = SimpleNamespace(synchronize=lambda: waited.append("copied"))
    group: Any = SimpleNamespace(fsdp_params=[SimpleNamespace(grad_offload_event=event)])

    def finalize_backward(self: Any) -> None:
        for param in self.fsdp_params:
            if param.grad_offload_event is not None:
                param.grad_offload_event.synchronize()

    monkeypatch.setattr(fsdp.FSDPParamGroup, "finalize_backward", finalize_backward)
    with injected(f"offload-copy-not-awaited{suffix}"):
        patched: Any = fsdp.FSDPParamGroup
        patched.finalize_backward(group)
    assert len(waited) == waits
