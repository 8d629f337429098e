"""Compiled cells: blocks are compiled under instruments, which see their operators, and no graph outlives its run."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch._dynamo.utils import counters

from conformance.experiments.training import train_cell
from conformance.instruments.facts import CompilationFacts, RankFacts
from conformance.laws.numerics import test_mp, test_par
from conformance.plan.cells import Cell
from conformance.run.experiment import TRAINING, job_of, json_like
from conformance.run.pool import Pools, Task
from conformance.run.ranks.messages import RankContext

LAYERS, STEPS = 2, 3


def payload(cell: Cell, directory: Path) -> dict[str, Any]:
    """Return the job of `train_cell`; compiled cells use aot_eager, since a C++ compiler takes many seconds."""
    job: dict[str, Any] = json_like(job_of(cell, directory, defect=None))
    if cell.compile:
        job["config"]["compile"] = "aot_eager"
    directory.mkdir()
    return job


def facts_of(result: dict[str, Any]) -> RankFacts:
    return msgspec.convert(result["facts"], RankFacts)


def run_alone(directory: Path, **axes: Any) -> RankFacts:
    """Train in a world of one rank in this process."""
    context = RankContext(rank=0, world_size=1, rendezvous=f"file://{directory}.store", timeout_s=60.0)
    return facts_of(train_cell(context, payload(Cell(mesh="dp1", **axes), directory)))


def run_in_ranks(pools: Pools, directory: Path, cell: Cell) -> list[RankFacts]:
    task = Task(TRAINING, payload(cell, directory))
    return [facts_of(result) for result in pools.run(task, world_size=cell.world_size, deadline_s=120)]


def test_a_silent_fallback_shows(tmp_path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):
        facts = run_alone(tmp_path / "run", compile=True)
    assert facts.blocks == CompilationFacts(graphs=0, compiled=0, eager=LAYERS * STEPS, breaks=0)


def test_graphs_do_not_outlive_their_run(tmp_path: Path) -> None:
    """Each run compiles its own graphs."""
    for number in (1, 2):
        counters.clear()
        run_alone(tmp_path / f"run{number}", compile=True)
        run_alone(tmp_path / f"plain{number}")
        assert counters["stats"]["unique_graphs"] == 1


def test_what_instruments_see_of_compiled_cells(tmp_path: Path, pools: Pools) -> None:
    """Instruments see every collective and matrix product of compiled blocks, and the next run is unaffected."""
    cell = Cell(mesh="tp2")
    plain = run_in_ranks(pools, tmp_path / "before", cell)
    compiled = run_in_ranks(pools, tmp_path / "compiled", cell.but(compile=True))
    after = run_in_ranks(pools, tmp_path / "after", cell)
    assert [facts.fingerprints for facts in after] == [facts.fingerprints for facts in plain]
    for ours, theirs in zip(compiled, plain, strict=True):
        assert ours.blocks == CompilationFacts(graphs=1, compiled=LAYERS * STEPS, eager=0, breaks=0)
        assert Counter(ours.collectives) == Counter(theirs.collectives)
        assert {"matmul/forward", "matmul/backward", "attention/forward"} <= ours.dtypes.keys()
        assert {name for name in theirs.dtypes if name not in ours.dtypes} == {
            name for name in theirs.dtypes if name.startswith(("unsharded_p", "module_", "rope_")) and "layers." in name
        }


def test_graphs_of_a_model_break_at_fsdp_and_are_those_of_its_blocks(tmp_path: Path) -> None:
    """Nothing is compiled again in a later step, and no instrument is compiled."""
    counters.clear()
    model = run_alone(tmp_path / "model", compile=True, compiled="model")
    assert counters["stats"]["unique_graphs"] == 1
    blocks = run_alone(tmp_path / "blocks", compile=True)
    assert model.blocks.breaks > 0 == blocks.blocks.breaks
    assert model.fingerprints == blocks.fingerprints
    assert (model.blocks.graphs, model.blocks.compiled) == (1, LAYERS * STEPS)


def test_operators_that_inductor_hides_are_not_missed_and_nothing_else_is_forgiven() -> None:
    """MP-1: kernels may hide products and attention; visible operators must be right."""
    expected = {"matmul/forward": ["bfloat16"], "attention/backward": ["bfloat16"], "gradient/norm": ["float32"]}
    facts: Any = SimpleNamespace(dtypes={"matmul/forward": ["float32"]})
    for backend, left in (("inductor", {"matmul/forward", "gradient/norm"}), ("aot_eager", set(expected))):
        record: Any = SimpleNamespace(config=SimpleNamespace(compile=backend))
        assert test_mp._seen(expected, facts, record).keys() == left


@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_inductor_is_compared_with_a_run_that_recomputes_alike(backend: str) -> None:
    """PAR-4: inductor rounds differently where it recomputes; resharding changes no bit."""
    compared: list[Cell] = []

    def run(cell: Cell) -> Any:
        compared.append(cell)
        config, ranks = SimpleNamespace(compile=backend), [SimpleNamespace(fingerprints={"final/w": ""})]
        return SimpleNamespace(
            config=config, ranks=ranks, select=lambda _: {"w": torch.ones(1)}, losses=[1.0], grad_norms=[1.0]
        )

    cell = Cell(reshard="always", compile=True, activation_checkpointing="full")
    test_par.test_reshard_prefetch_and_checkpointing_change_no_bit(run, cell)  # type: ignore[arg-type]
    plain = compared[1]
    assert plain.reshard == "never"
    assert plain.activation_checkpointing == ("full" if backend == "inductor" else "none")
