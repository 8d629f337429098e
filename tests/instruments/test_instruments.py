"""Instruments and oracles without a training run: what they see, and what they say about known cases."""

from math import inf, sqrt
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from conformance.instruments.capture import fingerprint
from conformance.instruments.collectives import CollectiveLog, collective_kind
from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.poison import INTEGER_POISON, Poison, poison_, poisoned_elements
from conformance.instruments.sharding import fsdp_group_of, full, is_sharded_by_fsdp
from conformance.oracles import tolerance
from conformance.oracles.emulation import Emulation
from conformance.oracles.reference import ReferenceRun, total_norm
from conformance.plan.cells import Cell, axis_choices, axis_names
from reference_trainer.config import ModelConfig, OptimizerConfig
from reference_trainer.model import Transformer

# Collectives


def operators() -> list[str]:
    """All operators of c10d that this torch has."""
    schemas = torch._C._jit_get_all_schemas()
    names = {schema.name for schema in schemas}
    return sorted(name for name in names if name.startswith(("c10d::", "_c10d_functional::")))


@pytest.mark.parametrize("operator", operators())
def test_the_kind_of_every_operator_is_known(operator: str) -> None:
    name = operator.partition("::")[2].replace("_", "")
    kind = collective_kind(operator)
    if kind is None:
        assert any(word in name for word in ("wait", "wrap", "send", "recv", "p2p", "nan", "monitored")), operator
    else:
        assert kind.replace("_", "") in name


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("c10d::_allgather_base_", "all_gather"),
        ("c10d::allgather_into_tensor_coalesced_", "all_gather"),
        ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("c10d::scatter_", "scatter"),
        ("c10d::gather_", "gather"),
        ("c10d::reduce_", "reduce"),
        ("c10d::allreduce_", "all_reduce"),
        ("c10d::alltoall_base_", "all_to_all"),
        ("c10d::barrier", "barrier"),
        ("c10d::monitored_barrier_", None),
        ("c10d::send", None),
        ("_c10d_functional::all_reduce_coalesced", "all_reduce"),
        ("_c10d_functional::wait_tensor", None),
    ],
)
def test_kinds_of_collectives(operator: str, kind: str | None) -> None:
    assert collective_kind(operator) == kind


def test_an_unknown_operator_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="unknown collective c10d::teleport_"):
        collective_kind("c10d::teleport_")


def test_collective_log(mesh: DeviceMesh) -> None:
    log = CollectiveLog()
    tensor = torch.ones(6, dtype=torch.bfloat16)
    with DispatchTap([log.listen]) as tap:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        log.phase("forward", step=2)
        dist.all_gather([torch.empty(3)], torch.ones(3), group=mesh.get_group())
        with tap.paused():
            dist.all_reduce(tensor)
        dist.broadcast(torch.ones(2, dtype=torch.int64), src=0)
        torch.ones(2).add(1)
    entries = [(e.step, e.phase, e.kind, e.numel, e.nbytes, e.dtype, e.reduce_op) for e in log.facts(mesh)]
    assert entries == [
        (-1, "build", "all_reduce", 6, 12, "bfloat16", "MAX"),
        (2, "forward", "all_gather", 3, 12, "float32", None),
        (2, "forward", "broadcast", 2, 16, "int64", None),
    ]
    assert {e.group for e in log.facts(mesh)} == {"dp_shard"}


def test_the_tap_sees_inside_dtensors(mesh: DeviceMesh) -> None:
    seen: list[tuple[str, tuple[type, ...]]] = []

    def listen(func: Any, args: Any) -> None:
        seen.append((func._schema.name, tuple(type(a) for a in args if isinstance(a, Tensor))))

    left = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    right = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with DispatchTap([listen]):
        product = left @ right
    assert isinstance(product, DTensor)
    assert ("aten::mm", (Tensor, Tensor)) in seen
    assert all(DTensor not in kinds for _, kinds in seen)
    seen.clear()
    left @ right
    assert seen == []


# Poison, fingerprints, sharding


@pytest.mark.parametrize(
    ("dtype", "counted"),
    [
        (torch.float32, 6),
        (torch.bfloat16, 6),
        (torch.complex64, 6),
        (torch.int64, 6),
        (torch.int8, 6),
        (torch.uint8, 6),
        (torch.bool, 0),
    ],
)
@pytest.mark.parametrize("distributed", [False, True])
def test_poison(mesh: DeviceMesh, dtype: torch.dtype, counted: int, distributed: bool) -> None:
    tensor = torch.zeros(2, 3, dtype=dtype)
    if distributed:
        tensor = distribute_tensor(tensor, mesh, [Shard(0)])
    assert poisoned_elements(tensor) == 0
    poison_(tensor)
    assert poisoned_elements(tensor) == counted
    if not dtype.is_floating_point and not dtype.is_complex:
        assert set(full(tensor).flatten().tolist()) == {True if dtype == torch.bool else INTEGER_POISON}


def test_poison_finds_what_initialisation_forgets() -> None:
    model = Transformer(ModelConfig(n_layers=1, dim=8, n_heads=2, n_kv_heads=1, ffn_dim=8))
    poison = Poison()
    poison.materialized(model)
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    assert poison.poisoned.keys() == names
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "norm.weight":
                parameter.zero_()
    model.rope_table[0].zero_()
    poison.initialized(model)
    forgotten = {name: number for name, number in poison.surviving.items() if number}
    assert forgotten == {"norm.weight": 8, "rope_table": model.rope_table.numel() // 2}


def test_fingerprint() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    same = [tensor.clone(), tensor.t().contiguous().t(), torch.cat([tensor, tensor])[:2]]
    others = [
        tensor.reshape(3, 2),
        tensor.double(),
        tensor.view(torch.int32),
        tensor.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(-0.0)),
        tensor.nextafter(torch.full_like(tensor, 9.0)),
        torch.tensor(1.0),
        torch.empty(0, 3),
    ]
    assert {fingerprint(other) for other in same} == {fingerprint(tensor)}
    assert len({fingerprint(other) for other in [tensor, *others]}) == len(others) + 1


def test_who_owns_and_shards_a_parameter(mesh: DeviceMesh) -> None:
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert not any(is_sharded_by_fsdp(p) for p in model.parameters())
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert all(is_sharded_by_fsdp(p) for p in model.parameters())
    assert set(fsdp_group_of(model).items()) == {
        ("0.weight", ""),
        ("0.bias", ""),
        ("1.0.weight", "1"),
        ("1.0.bias", "1"),
    }


# Tolerances


def test_tolerances_of_the_tiny_workload() -> None:
    config = Cell().config
    layer = 5 * sqrt(32) + sqrt(4) + sqrt(16) + sqrt(64)
    stages = 2 * layer + 2 * sqrt(32) + sqrt(61)
    assert tolerance.forward_stages(config.model, seq_len=16) == pytest.approx(stages)
    assert tolerance.fp32_loss(config) == pytest.approx((stages + sqrt(256)) / 2**24)
    assert tolerance.fp32_gradients(config) == pytest.approx((3 * stages + sqrt(256)) / 2**24)
    assert 1e-6 < tolerance.fp32_loss(config) < tolerance.fp32_gradients(config) < 1e-4
    run = ReferenceRun(initial={}, gradients=[{"w": torch.ones(3)}])
    assert tolerance.moments(1.0, run, OptimizerConfig()) == {"exp_avg": 2.0, "exp_avg_sq": 4.0}


@pytest.mark.parametrize(
    ("order", "condition"), [(2.0, 1.0), (1.0, 2.0 * 5.0 / 7.0), (3.0, 5.0 / 91 ** (1 / 3)), (inf, 1.25)]
)
def test_condition_of_a_norm(order: float, condition: float) -> None:
    """Four elements: 3, 4 and two zeros. No error of a given 2-norm changes the norm by more than the condition."""
    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0], [0.0]])}
    assert tolerance.norm_condition(gradients, order=order) == pytest.approx(condition)
    norm = total_norm(gradients.values(), order=order)
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        error = {name: torch.randn(grad.shape, generator=generator) * 1e-3 for name, grad in gradients.items()}
        size = total_norm(error.values(), order=2.0) / total_norm(gradients.values(), order=2.0)
        changed = total_norm([grad.double() + error[name] for name, grad in gradients.items()], order=order)
        assert abs(changed - norm) / norm <= condition * size * (1 + 1e-9)


def test_rounding_of_a_norm_whose_terms_are_given() -> None:
    gradients = {"w": torch.ones(64)}
    assert tolerance.norm(gradients, order=inf) == 0.0
    assert tolerance.norm(gradients, order=3.0) == tolerance.norm(gradients, order=1.0) == 8 / 2**24
    assert tolerance.clipping(gradients, order=inf) == {"w": 3 / 2**24}
    mixed = gradients | {"v": torch.ones(36, dtype=torch.bfloat16)}
    assert tolerance.norm(mixed, order=inf) == 0.0
    assert tolerance.norm(mixed, order=2.0) == 1 / 2**8 + 10 / 2**24
    assert tolerance.clipping(mixed, order=inf) == {"w": 3 / 2**24, "v": 1 / 2**24 + 2 / 2**8}


@pytest.mark.parametrize("change", [{"n_layers": 3}, {"dim": 64}, {"ffn_dim": 128}, {"vocab_size": 122}])
def test_tolerances_grow_with_the_model(change: dict[str, Any]) -> None:
    config = Cell().config
    larger = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **change))
    for bound in (tolerance.fp32_loss, tolerance.fp32_gradients):
        assert 0 < bound(config) < bound(larger)


def test_no_bit_may_differ_from_the_emulation_where_sums_have_one_order() -> None:
    def bound(mesh: str, **axes: Any) -> float:
        emulated = Emulation(1.0, {"w": torch.ones(2)}, {"w": 1.5})
        return tolerance.emulated_gradients(Cell(mesh=mesh, **axes).config, emulated)["w"]

    for mesh in ("dp1", "dp2", "hsdp2x2", "tp2", "dp2-tp4"):
        assert bound(mesh, precision="bf16-mp") == 0.0
    assert bound("dp2") == bound("hsdp2x2") == 0.0
    assert bound("dp4") == bound("dp4", precision="bf16-mp") == pytest.approx(2 * 3 * 1.5 / 2**24)
    assert bound("dp4") < bound("dp8") < bound("tp2") == bound("dp2", compile=True)


def test_the_factor_of_bf16_errors_shrinks_with_the_number_of_tokens() -> None:
    config = Cell(precision="bf16-mp").config
    longer = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, global_batch_size=1024))
    assert 1.0 < tolerance.bf16_error_factor(longer) < tolerance.bf16_error_factor(config) < 1.5


def test_tolerance_of_updates() -> None:
    error, roundoff = 1e-6, tolerance.FP32_ROUNDOFF

    def bound(*, final: float = 1.0, **optimizer: Any) -> float:
        """Three equal gradients of 0.5 have moved a parameter from 2 to `final`."""
        run = ReferenceRun(
            initial={"w": torch.full((3,), 2.0)},
            grad_norms=[1.0] * 3,
            gradients=[{"w": torch.full((3,), 0.5)}] * 3,
            parameters={"w": torch.full((3,), final)},
        )
        return tolerance.updates(error, run, OptimizerConfig(max_norm=0.0, **optimizer))["w"]

    assert bound(name="sgd") == pytest.approx(3 * (2 * error + roundoff))
    # A small change of a large parameter is lost in the parameter's own rounding.
    assert bound(name="sgd", final=1.5) == pytest.approx(3 * (2 * error + 3 * roundoff))
    # AdamW's step g / (|g| + eps) hardly depends on a gradient that is large against eps.
    assert bound(eps=0.001) == pytest.approx(3 * (error * (1 + 0.001 / 0.501) + roundoff))
    assert bound(eps=10.0) == pytest.approx(3 * (error * (1 + 10 / 10.5) + roundoff))


# Workload


def alternatives() -> list[tuple[str, Any]]:
    """Another value than the default for every axis that has one."""
    default = Cell()
    numbers = {"clip": 0.5, "dropout": 0.25, "saved_on": "dp4", "steps": 4, "seed": 1}
    found: list[tuple[str, Any]] = [("mesh", mesh) for mesh in ("dp1", "dp4", "tp2", "dp2-tp2", "hsdp2x2")]
    for name in axis_names():
        value = getattr(default, name)
        if type(value) is bool:
            found.append((name, not value))
        elif name in numbers:
            found.append((name, numbers[name]))
        else:
            found += [(name, choice) for choice in axis_choices(name) if choice != value]
    return found


def test_every_axis_with_a_choice_is_varied() -> None:
    single = {name for name in axis_names() if len(axis_choices(name)) == 1}
    assert {name for name, _ in alternatives()} | single == set(axis_names())


# What decides which runs there are, and is no part of a run's configuration.
OF_RUNS = ("record_streams", "expandable_segments", "saved_on", "saving")
NEEDED: dict[str, dict[str, Any]] = {
    "loss_scale": {"precision": "fp16-mp"},
    "weights": {"init": "checkpoint"},
    "pin_memory": {"offload": "cpu"},
    "norms_in_tp": {"sequence_parallel": False},
    "implementation": {"init": "full"},
    "limit_all_gathers": {"init": "full", "implementation": "fsdp1"},
}


@pytest.mark.parametrize(("axis", "value"), alternatives(), ids=lambda part: str(part))
def test_every_axis_reaches_the_trainer(axis: str, value: Any) -> None:
    if axis not in OF_RUNS:
        base = Cell(**NEEDED.get(axis, {}))
        assert base.but(**{axis: value}).config != base.config


@pytest.mark.parametrize(
    "axes",
    [{"weights": "hf"}, {"weights": "rank0", "init": "full"}, {"saving": "async"}, {"loss_scale": "overflows"}],
)
def test_an_axis_without_effect_is_refused(axes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"cell dp2-fp32-.*: (weights|saving|loss_scale) .* need"):
        Cell(**axes).config


def test_every_cell_has_a_valid_configuration_of_its_own() -> None:
    others = [(axis, value) for axis, value in alternatives() if axis not in OF_RUNS]
    cells = [Cell(), *(Cell(**{**NEEDED.get(axis, {}), axis: value}) for axis, value in others)]
    configurations = {msgspec.json.encode(cell.config) for cell in cells}
    assert len(configurations) == len({cell.id for cell in cells}) == len(cells)
    assert {cell.config.device for cell in cells} == {"cpu"}
