"""Laws on facts that neither the CPU nor a defect shows: places on a GPU, attention by products, other optimizers."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from conformance.assertions.axes.effects import optimizer_takes_effect
from conformance.instruments.facts import IssuedOperator, RankFacts, StreamFacts, UnorderedOperators
from conformance.instruments.fsdp_state import offloading_of
from conformance.laws.memory.test_mem import require_inputs_of_blocks
from conformance.laws.numerics import test_mp, test_off
from conformance.laws.schedule import test_ac
from conformance.laws.schedule.test_stream import test_fully_shard_orders_conflicting_accesses_of_streams as stream_6
from conformance.memory_segment import MemorySegment
from conformance.oracles.dtype_policy import expected_offloading, expected_places
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell, axis_choices
from tests.support.one_rank import record_of, train, world_of_one_rank

# OFF-2 on a machine with a GPU

HOST = {"optimizer_state/exp_avg/w": "cpu"}
PINNED = dict.fromkeys(("initial_parameter/w", "final_parameter/w", "gradient/w"), "cpu pinned")
DEVICE = dict.fromkeys(("unsharded_parameter/w", "initial_buffer/t", "logits", "matmul/forward"), "cuda")
CELLS = [Cell(), Cell(offload="cpu"), Cell(offload="cpu", pin_memory=True)]


def judge_places(cell: Cell, **changes: str) -> None:
    """Judge OFF-2 on a rank whose tensors are in the right places, with changes."""
    if cell.offload == "cpu":
        places = HOST | (PINNED if cell.pin_memory else dict.fromkeys(PINNED, "cpu")) | DEVICE
    else:
        places = dict.fromkeys([*HOST, *PINNED, *DEVICE], "cuda")
    offloading = expected_offloading(cell.config)
    offloading |= {name: value for name, value in changes.items() if name in offloading}
    places |= {name: value for name, value in changes.items() if name not in offloading}
    seen = {tensor: [place] for tensor, place in places.items()}
    facts = SimpleNamespace(rank=0, mesh_coordinate={}, offloading=offloading, places=seen)
    record: Any = SimpleNamespace(cell=cell, ranks=[facts], shards=[{}], device_type="cuda")
    run: Any = lambda _cell: record  # noqa: E731
    test_off.test_cpu_offload_state_is_in_host_memory(run, cell)


WRONG_PLACES = [
    *((CELLS[1], tensor, "cuda", rf"{tensor} is \['cuda'\], expected \['cpu'\]") for tensor in (*HOST, *PINNED)),
    *((cell, tensor, "cpu", rf"{tensor} is \['cpu'\], expected \['cuda'\]") for cell in CELLS for tensor in DEVICE),
    *((CELLS[2], tensor, "cpu", rf"{tensor} is \['cpu'\], expected \['cpu pinned'\]") for tensor in PINNED),
    *((cell, "norm.weight", "none", "norm.weight is none, expected ") for cell in CELLS[1:]),
    (CELLS[0], "norm.weight", "cpu", "norm.weight is cpu, expected "),
]


def test_each_tensor_in_another_place_fails() -> None:
    for cell in CELLS:
        judge_places(cell)
    for cell, tensor, place, message in WRONG_PLACES:
        with pytest.raises(ConformanceFailure, match=message):
            judge_places(cell, **{tensor: place})


def test_expected_places_are_those_of_the_recorded_kinds() -> None:
    expected = {"gradient/w": ["cpu"], "rope_table/x/forward": ["cuda"]}
    assert expected_places(CELLS[1].config, list(expected), device="cuda") == expected


@pytest.mark.parametrize(
    ("state", "missing"),
    [
        ({"_fsdp_param_groups": [SimpleNamespace(fsdp_params=[SimpleNamespace(pin_memory=True)])]}, "offload_to_cpu"),
        ({"_fsdp_param_groups": [SimpleNamespace(params=[])]}, "fsdp_params"),
        ({"groups": []}, "_fsdp_param_group"),
    ],
)
def test_a_torch_that_keeps_the_policy_elsewhere_is_named(state: dict[str, Any], missing: str) -> None:
    class Managed(FSDPModule, nn.Linear):
        def __new__(cls, *_args: Any) -> Any:
            return object.__new__(cls)

        def _get_fsdp_state(self) -> Any:
            return SimpleNamespace(**state)

    message = rf"^torch .* no attribute '{missing}'; adapt conformance\.instruments\.fsdp_state"
    with pytest.raises(RuntimeError, match=message):
        offloading_of(Managed(1, 1))


# MP-1 and AC-1 where attention is products and a softmax, as on CUDA in fp32 for heads of odd sizes

UNEVEN = Cell(mesh="dp1", model="uneven", steps=1)


@pytest.fixture
def unfused_attention() -> Iterator[None]:
    """World of one rank on the CPU, which does without its fused operator as well if flash attention is disabled."""
    torch.backends.cuda.enable_flash_sdp(False)
    with world_of_one_rank():
        yield
    torch.backends.cuda.enable_flash_sdp(True)


def judge_run(law: Any, cell: Cell, directory: Path, facts: RankFacts) -> None:
    record = record_of(directory, cell, facts, {})
    law(run=lambda _: record, cell=cell)


@pytest.mark.usefixtures("unfused_attention")
def test_dtypes_of_attention_by_products(tmp_path: Path) -> None:
    mp_1 = test_mp.test_dtypes_are_those_of_the_mixed_precision_policy
    for cell in (UNEVEN.but(precision="bf16-mp"), UNEVEN):
        facts, _ = train(cell)
        assert "attention/forward" not in facts.dtypes
        judge_run(mp_1, cell, tmp_path, facts)
    for phase in ("forward", "backward"):
        dtypes = {**facts.dtypes, f"matmul/{phase}": ["bfloat16", "float32"]}
        message = f"matmul/{phase}: measured bfloat16 and float32, expected float32"
        with pytest.raises(ConformanceFailure, match=message):
            judge_run(mp_1, UNEVEN, tmp_path, msgspec.structs.replace(facts, dtypes=dtypes))


@pytest.mark.usefixtures("unfused_attention")
def test_recomputation_of_attention_by_products(tmp_path: Path) -> None:
    ac_1 = test_ac.test_backward_recomputes_exactly_the_dropped_activations
    cells = {mode: UNEVEN.but(activation_checkpointing=mode) for mode in ("none", "full", "selective")}
    facts = {mode: train(cell)[0] for mode, cell in cells.items()}
    for mode, cell in cells.items():
        judge_run(ac_1, cell, tmp_path, facts[mode])
        judge_run(ac_1, cell.but(dropout=0.1), tmp_path, train(cell.but(dropout=0.1))[0])
    for mode, computed_as in (("full", "none"), ("full", "selective"), ("none", "full"), ("selective", "full")):
        with pytest.raises(ConformanceFailure, match=r"attention: measured|matrix products: measured"):
            judge_run(ac_1, cells[mode], tmp_path, facts[computed_as])


# The axis `optimizer`: state and operators of a record

ADAMW = ("exp_avg", "exp_avg_sq")
EFFECTS: dict[str, tuple[tuple[str, ...], str]] = {
    "adamw": (ADAMW, "aten::addcdiv_"),
    "adamw-foreach": (ADAMW, "aten::_foreach_addcdiv_"),
    "adamw-fused": (ADAMW, "aten::_fused_adamw_"),
    "sgd": ((), "aten::add_"),
    "sgd-momentum": (("momentum_buffer",), "aten::add_"),
}
"""Keys of the state, and an operator of the step, by optimizer."""


def optimizer_record(optimizer: Any, *, effects: str = "", device: str = "cpu") -> Any:
    """Return a record of a cell with the state and the operators of another optimizer, or its own."""
    state, operator = EFFECTS[effects or optimizer]
    facts = SimpleNamespace(
        fingerprints=[f"final/{kind}/w" for kind in ("parameter", *state)],
        operators={"optimizer": {operator: 3, "aten::_foreach_add_": 3}},
    )
    return SimpleNamespace(cell=Cell(optimizer=optimizer), ranks=[facts], device_type=device)


def test_an_optimizer_has_its_own_effects_and_no_others() -> None:
    assert sorted(EFFECTS) == sorted(map(str, axis_choices("optimizer")))
    for optimizer in EFFECTS.keys() - {"adamw"}:
        optimizer_takes_effect(optimizer_record(optimizer), optimizer_record("adamw"))
        for effects in EFFECTS.keys() - {optimizer}:
            with pytest.raises(ConformanceFailure, match=r"state is|steps with"):
                optimizer_takes_effect(optimizer_record(optimizer, effects=effects), optimizer_record("adamw"))


def test_the_neighbour_has_torchs_own_choice() -> None:
    """On a CUDA device that is foreach."""
    on_device = optimizer_record("adamw", effects="adamw-foreach", device="cuda")
    optimizer_takes_effect(optimizer_record("adamw-fused", device="cuda"), on_device)
    with pytest.raises(ConformanceFailure, match="by default steps with"):
        optimizer_takes_effect(optimizer_record("adamw-fused"), optimizer_record("adamw", effects="adamw-foreach"))


# MEM-1 under full activation checkpointing

INPUT_BYTES = 8 * 8 * 64 * 4
"""Half of 16 samples, half of 16 positions, 64 fp32 numbers each."""


@pytest.mark.parametrize("more_bytes", [0, 4])
def test_checkpointing_that_holds_more_than_inputs_fails(more_bytes: int) -> None:
    block_bytes = INPUT_BYTES + torch.get_rng_state().nbytes + more_bytes

    def measure(*_: Any) -> list[list[MemorySegment]]:
        return [[MemorySegment(f"after-forward layers.{i}", i * block_bytes, 0, 0) for i in range(3)]]

    arguments: Any = (measure, Cell(mesh="dp2-tp2", model="deep", activation_checkpointing="full"))
    if not more_bytes:
        require_inputs_of_blocks(*arguments)
        return
    with pytest.raises(ConformanceFailure, match="kept of a block"):
        require_inputs_of_blocks(*arguments)


# STREAM-6: messages, and a trace without streams

GROUP = "torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py"
COPY_OUT = IssuedOperator("fsdp::split_with_sizes_copy", "default stream", ["torch/x.py:1 f", f"{GROUP}:463 wait"])
NORM = IssuedOperator("aten::_foreach_norm", "default stream", ["torch/nn/utils/clip_grad.py:95 norm", "a.py:1 b"])
GATHER = IssuedOperator("c10d::_allgather_base_", "all_gather_stream", [f"{GROUP}:407 unshard"])
USED = {"default stream": 3, "all_gather_stream": 1}


def judge_streams(streams: StreamFacts | None) -> None:
    record = SimpleNamespace(ranks=[SimpleNamespace(rank=0, streams=streams)])
    run: Any = lambda _: record  # noqa: E731
    stream_6(run, Cell())


@pytest.mark.parametrize("streams", [None, StreamFacts({"default stream": 4}, 1, []), StreamFacts(USED, 0, [])])
def test_a_run_whose_streams_were_not_seen_is_an_error_of_the_suite(streams: StreamFacts | None) -> None:
    judge_streams(StreamFacts(USED, 1, []))
    with pytest.raises(RuntimeError, match=r"torch \S+ asks the device for no streams"):
        judge_streams(streams)


COPY_ON_STREAM = rf"copy on default stream \({GROUP}:463 wait\) accesses the same memory as c10d::"
REUSED_MEMORY = rf"_base_ on all_gather_stream \({GROUP}:407 unshard\) may be given the memory of fsdp"
NORM_OF_CALLER = r"norm on default stream \(torch/nn/utils/clip_grad.py:95 norm, from a.py:1 b\) accesses"


@pytest.mark.parametrize(
    ("race", "text"),
    [
        (UnorderedOperators(GATHER, COPY_OUT, False), COPY_ON_STREAM),
        (UnorderedOperators(COPY_OUT, GATHER, True), REUSED_MEMORY),
        (UnorderedOperators(GATHER, NORM, False), NORM_OF_CALLER),
    ],
)
def test_a_race_is_reported_with_both_places(race: UnorderedOperators, text: str) -> None:
    with pytest.raises(ConformanceFailure, match=text):
        judge_streams(StreamFacts(USED, 1, [race]))
