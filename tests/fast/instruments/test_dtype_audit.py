"""Dtype audit of a run of one rank, and the laws on dtypes, buffers, optimizer and batches on records with a fault."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

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

    def judge(self, law: str, facts: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Apply a law to the run's record with other facts and tensors."""
        changed = msgspec.structs.replace(self.facts, **facts)
        record = record_of(self.directory, CELL, changed, {**self.tensors, **tensors})
        LAWS[law](run=lambda _cell: record, cell=CELL)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return FinishedRun(tmp_path_factory.mktemp("record"), *train(CELL))


# Policy and audit


def test_a_precision_without_policy_is_an_error() -> None:
    with pytest.raises(ValueError, match="no dtype policy for precision 'fp8', only for fp32, bf16-mp"):
        dtype_policy("fp8")


def test_a_model_without_policy_is_an_error() -> None:
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


# Laws


@pytest.mark.parametrize("law", LAWS)
def test_the_run_itself_passes(finished: FinishedRun, law: str) -> None:
    finished.judge(law, {}, {})


def test_a_second_dtype_of_anything_fails(finished: FinishedRun) -> None:
    one_of_each_kind = {thing.split("/")[0]: thing for thing in finished.facts.dtypes}
    for thing in one_of_each_kind.values():
        dtypes = [*finished.facts.dtypes[thing], "float16"]
        with pytest.raises(ConformanceFailure, match=re.escape(f"rank 0: {thing}: measured {' and '.join(dtypes)}")):
            finished.judge("MP-1", {"dtypes": {**finished.facts.dtypes, thing: dtypes}}, {})


@pytest.mark.parametrize(
    ("law", "thing"),
    [
        ("MP-1", "block_input/layers.1"),
        ("MP-1", "unsharded_parameter/layers.0.attention.wq.weight"),
        ("MP-1", "matmul/backward"),
        ("MP-3", "rope_table/layers.1.attention/backward"),
        ("MP-3", "final_buffer/rope_table"),
        ("MP-5", "optimizer_state/exp_avg/norm.weight"),
        ("MP-5", "gradient/norm.weight"),
    ],
)
def test_a_thing_that_was_never_seen_fails(finished: FinishedRun, law: str, thing: str) -> None:
    seen = {key: dtypes for key, dtypes in finished.facts.dtypes.items() if key != thing}
    assert len(seen) == len(finished.facts.dtypes) - 1
    with pytest.raises(ConformanceFailure, match=re.escape(f"{thing}: measured nothing, expected ")):
        finished.judge(law, {"dtypes": seen}, {})


@pytest.mark.parametrize("kind", ["initial_parameter", "final_parameter", "gradient", "optimizer_state/exp_avg"])
def test_bf16_masters_fail(finished: FinishedRun, kind: str) -> None:
    thing = f"{kind}/norm.weight"
    with pytest.raises(ConformanceFailure, match=f"{thing}: measured bfloat16, expected float32"):
        finished.judge("MP-5", {"dtypes": {**finished.facts.dtypes, thing: ["bfloat16"]}}, {})


def test_a_collective_too_many_fails(finished: FinishedRun) -> None:
    sent = Collective(0, "forward", "all_gather", "dp_shard", 8, 32, "float32", None)
    with pytest.raises(ConformanceFailure, match="all_gather of 8 over dp_shard: measured float32, expected nothing"):
        finished.judge("MP-1", {"collectives": [sent]}, {})


def test_a_rounded_table_fails(finished: FinishedRun) -> None:
    tables = {**finished.facts.rope_tables, "layers.0.attention/backward": ["0123456789abcdef"]}
    with pytest.raises(ConformanceFailure, match=r"layers\.0\.attention/backward: measured 0123456789abcdef"):
        finished.judge("MP-3", {"rope_tables": tables}, {})
    rounded = finished.tensors["final/buffer/rope_table"].bfloat16().float()
    with pytest.raises(ConformanceFailure, match="buffers of rank 0 after training: 1 of 1 tensors differ in bits"):
        finished.judge("MP-3", {}, {"final/buffer/rope_table": rounded})


def test_lost_updates_fail(finished: FinishedRun) -> None:
    """The master is bf16, and only its copies are fp32."""
    name = "final/parameter/layers.0.ffn_norm.weight"
    with pytest.raises(ConformanceFailure, match=r"change of parameters of layers\.0\.ffn_norm\.weight"):
        finished.judge("MP-5", {}, {name: finished.tensors[name].bfloat16().float()})


@pytest.mark.parametrize("group", [0, 1])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda names: {"parameters": ["?", *names[1:]]}, r"holds \[\('\?', .*\)\] and misses \[\('"),
        (lambda names: {"parameters": names[1:]}, r"holds \[\] and misses \[\('"),
        (lambda names: {"parameters": [*names, names[0]]}, r"holds \[\('.*\)\] and misses \[\]"),
        (lambda _: {"weight_decay": 0.5}, r"holds \[\('.*', 0\.5, '0\.01'\).* and misses"),
        (lambda _: {"lr": 0.5}, r"holds \[\('.*, '0\.5'\).* and misses"),
    ],
    ids=["stranger", "left-out", "twice", "weight-decay", "learning-rate"],
)
def test_wrong_optimizer_groups_fail(finished: FinishedRun, change: Any, reason: str, group: int) -> None:
    groups = list(finished.facts.optimizer_groups)
    groups[group] = msgspec.structs.replace(groups[group], **change(groups[group].parameters))
    with pytest.raises(ConformanceFailure, match=reason):
        finished.judge("OPT-1", {"optimizer_groups": groups}, {})


def test_wrong_batches_fail(finished: FinishedRun) -> None:
    first, second = finished.facts.batches
    others: list[dict[str, Any]] = [
        {"batches": [second, first]},
        {"batches": [first]},
        {"batches": [first, {**second, "labels": first["labels"]}]},
        {"model_inputs": finished.facts.model_inputs[::-1]},
        {"model_inputs": []},
    ]
    for facts in others:
        with pytest.raises(ConformanceFailure, match="rank 0 at data-parallel coordinate 0: step "):
            finished.judge("DATA-1", facts, {})
