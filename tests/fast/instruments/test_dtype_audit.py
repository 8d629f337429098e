"""Dtype audit of a run of one rank, and the laws on dtypes, buffers, optimizer and batches on records with a fault."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch
from torch import Tensor, nn

from conformance.instruments.dtypes import DtypeAudit
from conformance.instruments.facts import Collective, RankFacts
from conformance.laws.numerics import test_data, test_mp, test_opt
from conformance.oracles.dtype_policy import dtype_policy, expected_dtypes
from conformance.oracles.reference import initial_model
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell, axis_choices
from tests.support.one_rank import record_of, train, world_of_one_rank

LAWS: dict[str, Callable[..., None]] = {
    "MP-1": test_mp.test_dtypes_are_those_of_the_mixed_precision_policy,
    "MP-3": test_mp.test_rope_tables_and_buffers_keep_every_bit,
    "MP-5": test_mp.test_master_weights_are_fp32,
    "OPT-1": test_opt.test_optimizer_holds_the_sharded_parameters,
    "DATA-1": test_data.test_each_data_parallel_coordinate_sees_its_samples,
}
CELL = Cell(mesh="dp1", precision="bf16-mp", activation_checkpointing="full", accumulation=2, steps=2)


@pytest.fixture(scope="module", autouse=True)
def _one_rank() -> Iterator[None]:
    with world_of_one_rank():
        yield


@dataclass
class FinishedRun:
    """Training run that has ended, of which records with a fault can be made."""

    directory: Path
    facts: RankFacts
    tensors: dict[str, Tensor]

    def judge(self, law: str, changes: dict[str, Any]) -> None:
        """Apply a law to the run's record with other facts, and other tensors, whose names have slashes."""
        tensors = {name: tensor for name, tensor in changes.items() if "/" in name}
        facts = {name: fact for name, fact in changes.items() if name not in tensors}
        changed = msgspec.structs.replace(self.facts, **facts)
        record = record_of(self.directory, CELL, changed, {**self.tensors, **tensors})
        LAWS[law](run=lambda _cell: record, cell=CELL)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return FinishedRun(tmp_path_factory.mktemp("record"), *train(CELL))


def test_precisions_and_models_without_policy_are_errors() -> None:
    with pytest.raises(ValueError, match="no dtype policy for precision 'fp8', only for fp32, bf16-mp"):
        dtype_policy("fp8")
    with pytest.raises(ValueError, match=r"no dtype policy for model\.arithmetic integer"):
        expected_dtypes(Cell(model="integer").config)


@pytest.mark.parametrize(
    "axes",
    [
        *({"precision": precision} for precision in axis_choices("precision")),
        {"precision": "bf16-mp", "activation_checkpointing": "selective"},
        {"precision": "bf16-mixed", "optimizer": "sgd"},
        {"precision": "bf16-mp", "tied_embeddings": True},
    ],
    ids=lambda axes: "-".join(map(str, axes.values())),
)
def test_the_audit_sees_what_the_policy_expects(axes: dict[str, Any]) -> None:
    cell = Cell(mesh="dp1", steps=1, **axes)
    facts, _ = train(cell)
    assert facts.dtypes == expected_dtypes(cell.config)


def test_recomputed_attention_is_seen_in_both_phases(finished: FinishedRun) -> None:
    assert finished.facts.rope_tables.keys() == {
        f"layers.{layer}.attention/{phase}" for layer in range(2) for phase in ("forward", "backward")
    }
    assert finished.facts.dtypes.keys() >= {f"rope_table/{where}" for where in finished.facts.rope_tables}


def test_tied_weights_are_audited_under_both_names() -> None:
    expected = expected_dtypes(Cell(tied_embeddings=True).config)
    assert "unsharded_parameter/output.weight" in expected
    assert "unsharded_parameter/tok_embeddings.weight" in expected
    assert "gradient/output.weight" not in expected


def test_only_modules_called_in_forward_or_backward_are_seen() -> None:
    model = initial_model(CELL.config)
    audit = DtypeAudit()
    audit.initialized(model)
    audit.phase("data", step=0)
    model(torch.zeros(1, 4, dtype=torch.int64))
    assert {thing.split("/")[0] for thing in audit.facts()} == {"initial_parameter", "initial_buffer"}
    audit.phase("forward", step=0)
    model.blocks[0](torch.zeros(1, 4, model.config.dim), model.rope_table)
    seen = audit.facts()
    assert seen["block_input/layers.0"] == seen["module_output/layers.0.attention.wq"] == ["float32"]
    assert not [thing for thing in seen if "layers.1" in thing and "initial" not in thing]


def test_stages_of_another_model_are_no_pipeline() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.ModuleList([nn.Linear(2, 2)])

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", self.stages[0](x))

    model, audit = Stages(), DtypeAudit()
    audit.initialized(model)
    audit.phase("forward", step=0)
    model(torch.zeros(1, 2))
    assert audit.facts()["logits"] == ["float32"]


@pytest.mark.parametrize("law", LAWS)
def test_the_run_itself_passes(finished: FinishedRun, law: str) -> None:
    finished.judge(law, {})


def without(run: FinishedRun, thing: str) -> dict[str, Any]:
    return {"dtypes": {key: dtypes for key, dtypes in run.facts.dtypes.items() if key != thing}}


def with_dtypes(run: FinishedRun, thing: str, *dtypes: str) -> dict[str, Any]:
    return {"dtypes": {**run.facts.dtypes, thing: list(dtypes)}}


def rounded(run: FinishedRun, name: str) -> dict[str, Any]:
    """Return a tensor as a bf16 master would hold it."""
    return {name: run.tensors[name].bfloat16().float()}


def with_group(run: FinishedRun, change: Callable[[list[str]], dict[str, Any]]) -> dict[str, Any]:
    """Return the optimizer's groups, the second of them changed as a function of its parameters."""
    first, second = run.facts.optimizer_groups
    return {"optimizer_groups": [first, msgspec.structs.replace(second, **change(second.parameters))]}


def with_batches(run: FinishedRun, choose: Callable[[Any, Any], list[Any]]) -> dict[str, Any]:
    return {"batches": choose(*run.facts.batches)}


NORM, TABLE = "layers.0.ffn_norm.weight", "layers.0.attention/backward"
SENT = Collective(0, "forward", "all_gather", "dp_shard", 8, 32, "float32", None)


@pytest.mark.parametrize(
    ("law", "change", "message"),
    [
        ("MP-1", lambda run: with_dtypes(run, "block_input/layers.1", "bfloat16", "float16"), "bfloat16 and float16"),
        ("MP-1", lambda run: without(run, "matmul/backward"), "matmul/backward: measured nothing, expected "),
        ("MP-1", lambda _: {"collectives": [SENT]}, "all_gather of 8 over dp_shard: measured float32, expected"),
        ("MP-3", lambda run: without(run, "final_buffer/rope_table"), "final_buffer/rope_table: measured nothing"),
        ("MP-3", lambda run: {"rope_tables": {**run.facts.rope_tables, TABLE: ["01"]}}, f"{TABLE}: measured 01"),
        ("MP-3", lambda run: rounded(run, "final/buffer/rope_table"), "after training: 1 of 1 tensors differ in bits"),
        ("MP-5", lambda run: without(run, f"gradient/{NORM}"), f"gradient/{NORM}: measured nothing, expected "),
        ("MP-5", lambda run: with_dtypes(run, f"initial_parameter/{NORM}", "bfloat16"), "bfloat16, expected float32"),
        ("MP-5", lambda run: rounded(run, f"final/parameter/{NORM}"), f"change of parameters of {NORM}"),
        ("OPT-1", lambda run: with_group(run, lambda names: {"parameters": ["?", *names[1:]]}), "holds [('?', "),
        ("OPT-1", lambda run: with_group(run, lambda names: {"parameters": names[1:]}), "holds [] and misses [('"),
        ("OPT-1", lambda run: with_group(run, lambda names: {"parameters": names * 2}), "')] and misses []"),
        ("OPT-1", lambda run: with_group(run, lambda _: {"weight_decay": 0.5}), "', 0.5, '0.01')"),
        ("OPT-1", lambda run: with_group(run, lambda _: {"lr": 0.5}), ", '0.5')"),
        ("DATA-1", lambda run: with_batches(run, lambda first, second: [second, first]), "coordinate 0: step 0"),
        ("DATA-1", lambda run: with_batches(run, lambda first, _: [first]), "coordinate 0: step 1"),
        ("DATA-1", lambda run: with_batches(run, lambda a, b: [a, {**b, "labels": a["labels"]}]), ": step 1"),
        ("DATA-1", lambda run: {"model_inputs": run.facts.model_inputs[::-1]}, ": step 0"),
        ("DATA-1", lambda _: {"model_inputs": []}, "rank 0 at data-parallel coordinate 0: step 0"),
    ],
)
def test_a_run_with_a_fault_fails(
    finished: FinishedRun, law: str, change: Callable[[FinishedRun], dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConformanceFailure, match=re.escape(message)):
        finished.judge(law, change(finished))
