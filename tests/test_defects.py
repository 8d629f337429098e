"""Detection power: every defect is caught by the laws that it names, its twin and the product itself pass."""

import importlib
import inspect
import pkgutil
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch
from _pytest.outcomes import OutcomeException

import conformance.laws
import reference_trainer.checkpoint  # noqa: F401 - so that all that a defect may replace is loaded
from conformance.defects.catalogue import TWIN, defects, ids, injected
from conformance.defects.injection import Defect, NotInjectable, replaced
from conformance.defects.shown_by import SHOWN_BY
from conformance.engine.cells import Cell
from conformance.engine.law import law_of
from conformance.engine.matrix import load_matrix
from conformance.engine.pool import Pools
from conformance.engine.selection import parse
from conformance.engine.store import CellFailed, Clock, RecordStore
from conformance.engine.verdicts import Verdict, classify

PROJECT = Path(__file__).resolve().parents[1]
DEADLINE_S = 60.0
ALL_LAWS = frozenset(law for family in load_matrix(PROJECT / "matrix.yaml").families.values() for law in family.laws)
HANG_DEADLINE_S = 5.0


@cache
def laws() -> dict[str, Callable[..., None]]:
    """The test of each law, as a plain function."""
    modules = [
        importlib.import_module(f"conformance.laws.{m.name}") for m in pkgutil.iter_modules(conformance.laws.__path__)
    ]
    tests = [test for module in modules for test in vars(module).values() if law_of(test)]
    return {found.id: test for test in tests if (found := law_of(test))}


@dataclass
class Bench:
    """Judges cells of the matrix in this process, with one pool of ranks for all sessions."""

    directory: Path
    pools: Pools

    def store(self, *, defect: str | None = None, deadline_s: float = DEADLINE_S) -> RecordStore:
        return RecordStore(
            directory=self.directory,
            session="bench",
            torch_version=str(torch.__version__),
            defect=defect,
            deadline_s=deadline_s,
            pools=self.pools,
        )

    def verdicts(
        self, selection: str, *, defect: str | None, deadline_s: float = DEADLINE_S, only: Container[str] = ALL_LAWS
    ) -> dict[str, tuple[Verdict, str]]:
        """Verdict and reason of every case of the default profile on the selected cells, of all laws or some."""
        store = self.store(defect=defect, deadline_s=deadline_s)
        matrix = load_matrix(PROJECT / "matrix.yaml")
        found = {}
        for case in (case for case in matrix.cases("pr", only=parse(selection)) if case.law in only):
            store.clock = Clock()
            fixtures = {"run": store.run, "probe": store.probe, "measure": store.measure, "cell": case.cell}
            test = laws()[case.law]
            found[case.id] = judged(test, {name: fixtures[name] for name in inspect.signature(test).parameters})
        return found


def judged(test: Callable[..., None], arguments: dict[str, Any]) -> tuple[Verdict, str]:
    try:
        test(**arguments)
    except (Exception, OutcomeException) as error:
        return classify(error)
    return Verdict.PASS, ""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Pools() as pools:
        yield Bench(tmp_path_factory.mktemp("records"), pools)


def by_id(defect: Defect) -> str:
    return defect.id


SHOWN_HERE = [defect for defect in defects() if not defect.needs_cuda]


def test_every_defect_has_its_cells_here() -> None:
    assert SHOWN_BY.keys() == {defect.id for defect in SHOWN_HERE}, "name the cells that show it in SHOWN_BY"


@pytest.mark.parametrize("selection", sorted(set(SHOWN_BY.values())))
def test_the_product_passes(bench: Bench, selection: str) -> None:
    verdicts = bench.verdicts(selection, defect=None)
    assert verdicts
    assert {case: found for case, found in verdicts.items() if found[0] != Verdict.PASS} == {}


@pytest.mark.parametrize("defect", SHOWN_HERE, ids=by_id)
def test_a_defect_is_caught_by_its_laws(bench: Bench, defect: Defect) -> None:
    caught, deadline_s = (Verdict.TIMEOUT, HANG_DEADLINE_S) if defect.hangs else (Verdict.FAIL, DEADLINE_S)
    verdicts = bench.verdicts(SHOWN_BY[defect.id], defect=defect.id, deadline_s=deadline_s, only=defect.laws)
    failed = {case.partition("/")[0] for case, (verdict, _) in verdicts.items() if verdict == caught}
    assert failed == set(defect.laws), verdicts
    assert "TypeError" not in str(verdicts), "the injection does not fit what it replaces"


@pytest.mark.parametrize("defect", SHOWN_HERE, ids=by_id)
def test_a_twin_passes(bench: Bench, defect: Defect) -> None:
    verdicts = bench.verdicts(SHOWN_BY[defect.id], defect=defect.id + TWIN, only=defect.laws)
    assert {case.partition("/")[0] for case in verdicts} == set(defect.laws)
    assert {case: found for case, found in verdicts.items() if found[0] != Verdict.PASS} == {}


@pytest.mark.parametrize("defect", defects(), ids=by_id)
def test_an_entry_is_complete(defect: Defect) -> None:
    assert defect.id == defect.id.lower().strip()
    assert defect.title
    assert defect.mechanism
    assert defect.source.startswith("https://")
    assert defect.laws
    assert set(defect.laws) <= laws().keys()


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
    """Identity of all that lives in the trainer's and FSDP2's modules, and in the latter's classes."""

    def members(prefix: str, owner: ModuleType | type) -> Iterator[tuple[str, int]]:
        for name, value in vars(owner).items():
            yield f"{prefix}.{name}", id(value)
            if isinstance(owner, ModuleType) and isinstance(value, type) and value.__module__ == owner.__name__:
                yield from members(f"{prefix}.{name}", value)

    torch_modules = ("fsdp", "tensor", "checkpoint")
    prefixes = ("reference_trainer.", "torch.nn.utils.", *(f"torch.distributed.{name}." for name in torch_modules))
    modules = {name: module for name, module in sys.modules.items() if name.startswith(prefixes)}
    return {key: number for name, module in modules.items() for key, number in members(name, module)}


def test_nothing_is_injected_without_a_name() -> None:
    before = snapshot()
    with injected(None):
        assert snapshot() == before


@pytest.mark.parametrize("name", ["nonsense", "nonsense.twin", "grads-summed.twin.twin", ""])
def test_an_unknown_id_is_an_error(name: str) -> None:
    with pytest.raises(KeyError):
        injected(name)


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
    verdicts = bench.verdicts("id = dp2-fp32-default-meta-sgd", defect="nonsense")
    assert len(verdicts) == 2
    for verdict, reason in verdicts.values():
        assert verdict == Verdict.ERROR
        assert reason.endswith("raised KeyError: 'nonsense'")


def suspend_rank(number: int, *, until_s: float) -> None:
    """Stop that rank as soon as it trains: its output is `rankN.out`, beside the rendezvous of the running task."""
    while time.monotonic() < until_s:
        for process in psutil.Process().children(recursive=True):
            with suppress(OSError, psutil.Error):
                output = Path(f"/proc/{process.pid}/fd/1").readlink()
                if output.name == f"rank{number}.out" and any(output.parent.glob("rendezvous*")):
                    process.suspend()
                    return
        time.sleep(0.01)


def test_a_rank_that_hangs_is_told_from_its_waiting_peers(bench: Bench) -> None:
    limit_s = 6.0
    cell = Cell(mesh="dp2", seed=1)
    stopper = Thread(target=suspend_rank, args=(1,), kwargs={"until_s": time.monotonic() + limit_s})
    stopper.start()
    try:
        with pytest.raises(CellFailed) as caught:
            bench.store(deadline_s=limit_s).run(cell)
    finally:
        stopper.join()
    failure = caught.value.failure
    assert (failure.kind, failure.first_rank) == ("timeout", 1)
    assert failure.reason == f"no result from ranks 0, 1 within {limit_s:g} s; rank 1 did not wait for a peer"
    assert classify(caught.value)[0] == Verdict.TIMEOUT
    with pytest.raises(CellFailed, match="no result"):
        bench.store().run(cell)  # a hang is not repeated for the next law
