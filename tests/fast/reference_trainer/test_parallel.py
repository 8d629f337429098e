"""Parallel set-up of the trainer: resharding and prefetching of groups, and stages of pipelines."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from conformance.instruments.fsdp_state import backward_prefetch_of
from reference_trainer.config import (
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    ScheduleName,
    TrainerConfig,
)
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import ParallelDims, resolve_mesh
from reference_trainer.parallelize import parallelize
from reference_trainer.pipeline import check_pipeline, stage_layers
from reference_trainer.reshard import backward_order, device_memory_bytes, estimated_peak_bytes, reshard_policy

CPU = torch.device("cpu")
DIMS = ParallelDims(dp_replicate=1, dp_shard=4, tp=1)
MODEL = ModelConfig(n_layers=3)


def policy(reshard: Any, dims: ParallelDims = DIMS, **options: Any) -> list[bool | int]:
    config = TrainerConfig(model=MODEL, reshard=reshard, **options)
    return list(reshard_policy(config, dims, CPU).after_forward.values())


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("always", [True] * 5),
        ("never", [False] * 5),
        ("default", [True, True, True, True, False]),
        ("except-last", [True, True, True, False, False]),
        (2, [2] * 5),
        ({r"layers\.[01]": "never"}, [True, False, False, True, True]),
        ({r"layers\.1": 2, r"layers\..*": "never", "output": "always"}, [True, False, 2, False, True]),
    ],
)
def test_policies(mode: Any, expected: list[bool | int]) -> None:
    chosen = policy(mode)
    assert (chosen, list(map(type, chosen))) == (expected, list(map(type, expected)))


def test_the_order_of_ten_blocks_is_not_that_of_the_alphabet() -> None:
    config = TrainerConfig(model=ModelConfig(n_layers=11), reshard="except-last")
    kept = [name for name, after in reshard_policy(config, DIMS, CPU).after_forward.items() if not after]
    assert kept == ["layers.10", "output"]
    assert backward_order(config)[1:4] == ["layers.10", "layers.9", "layers.8"]


@pytest.mark.parametrize(
    ("mode", "dims", "message"),
    [
        ({r"layers\.9": "never"}, DIMS, r"layers\\.9 matches none of the groups that earlier expressions leave"),
        ({".*": "never", "output": "always"}, DIMS, "output matches none of the groups that earlier"),
        (3, DIMS, "reshard to 3 ranks: must be a divisor of mesh.dp_shard, 4, and smaller"),
        (4, DIMS, "reshard to 4 ranks: must be a divisor of mesh.dp_shard, 4, and smaller"),
        ({".*": 2}, ParallelDims(1, 4, 2), "reshard to 2 ranks with mesh.tp 2: torch cannot"),
    ],
)
def test_policies_that_are_refused(mode: Any, dims: ParallelDims, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy(mode, dims)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reshard": {"(": "never"}}, "'\\(' is not a regular expression"),
        ({"reshard": 1}, "reshard to 1 ranks: must be at least 2"),
        ({"reshard": {"output": 0}}, "reshard to 0 ranks: must be at least 2"),
        ({"memory_bytes": 5}, "memory_bytes is 5: at least 1, and only with reshard auto, which is default"),
        ({"memory_bytes": 0, "reshard": "auto"}, "memory_bytes is 0"),
    ],
)
def test_configurations_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainerConfig(**fields)
    with pytest.raises(ValueError, match="must rise"):
        PipelineConfig(cuts=(2, 2))


def test_auto_keeps_everything_if_it_fits() -> None:
    config = TrainerConfig(model=MODEL, reshard="auto")
    needed = estimated_peak_bytes(config, DIMS)
    assert policy("auto", memory_bytes=needed * 2) == policy("never")
    assert policy("auto", memory_bytes=needed) == policy("default")
    reason = reshard_policy(TrainerConfig(reshard="auto", memory_bytes=2**30), DIMS, CPU).reason
    assert reason.startswith("reshard auto: never, since keeping all parameters needs about 0.0")
    assert reason.endswith("90% of 1 GiB may be used")
    assert device_memory_bytes(CPU) > 2**28


@pytest.mark.parametrize(
    "fields",
    [
        {"precision": "bf16-mp"},
        {"optimizer": OptimizerConfig(name="sgd", momentum=0.9)},
        {"offload": "cpu"},
        {"activation_checkpointing": "full"},
        {"accumulation": 2},
        {"model": replace(MODEL, n_layers=2)},
    ],
    ids=str,
)
def test_the_estimate_follows_the_configuration(fields: dict[str, Any]) -> None:
    config = TrainerConfig(model=MODEL)
    assert estimated_peak_bytes(replace(config, **fields), DIMS) < estimated_peak_bytes(config, DIMS)


def test_a_model_with_other_groups_than_the_policy_is_refused(mesh: DeviceMesh) -> None:
    config = TrainerConfig(model=MODEL)
    shallow = TrainerConfig(model=ModelConfig(n_layers=2))
    with torch.device("meta"):
        model = Transformer(config.model)
    with pytest.raises(
        ValueError, match=r"named 'layers\.2': the groups are tok_embeddings, layers\.0, layers\.1, output"
    ):
        parallelize(model, mesh, config, reshard_policy(shallow, ParallelDims(1, 1, 1), CPU))


def test_a_policy_in_words() -> None:
    config = TrainerConfig(model=MODEL, mesh=MeshConfig(), reshard={r"layers\.1": 2, "layers.*": "never"})
    assert reshard_policy(config, DIMS, CPU).describe() == (
        "tok_embeddings: always, layers.0: never, layers.1: to 2 ranks, layers.2: never, output: always"
    )
    default = TrainerConfig(model=MODEL)
    assert reshard_policy(default, DIMS, CPU).describe() == "tok_embeddings to layers.2: always, output: never"


# Prefetching


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"forward_prefetch": 2}, {}),
        (
            {"backward_prefetch": 2, "model": ModelConfig()},
            {
                "norm": ["layers.1", "layers.0"],
                "layers.1": ["layers.0", "tok_embeddings"],
                "layers.0": ["tok_embeddings"],
            },
        ),
        (
            {"backward_prefetch": 9, "model": ModelConfig(tied_embeddings=True)},
            {"tok_embeddings": ["layers.1", "layers.0"], "layers.1": ["layers.0"]},
        ),
    ],
)
def test_groups_that_fsdp_prefetches_in_backward(
    mesh: DeviceMesh, fields: dict[str, Any], expected: dict[str, list[str]]
) -> None:
    """A group of several modules has the name of its first: norm, of norm and output, or the tied embedding."""
    config = TrainerConfig(**fields)
    with torch.device("meta"):
        model = Transformer(config.model)
    parallelize(model, mesh, config, reshard_policy(config, ParallelDims(1, 1, 1), CPU))
    assert backward_prefetch_of(model) == expected


def test_another_torch_is_an_error() -> None:
    class Managed(FSDPModule, nn.Linear):
        def _get_fsdp_state(self) -> Any:
            return self

    managed = nn.Module.__new__(Managed)
    nn.Module.__init__(managed)
    with pytest.raises(RuntimeError, match=r"_states_to_backward_prefetch.*; adapt .*\.fsdp_state"):
        backward_prefetch_of(managed)


# Pipelines


SIX_LAYERS = ModelConfig(n_layers=6)
ONE_F_ONE_B = PipelineConfig(schedule="1f1b")
CONFIG = TrainerConfig(model=SIX_LAYERS, mesh=MeshConfig(pp=2, dp_shard=2), accumulation=4, pipeline=ONE_F_ONE_B)


def checked(config: TrainerConfig) -> None:
    check_pipeline(config, resolve_mesh(config.mesh, world_size=4))


def scheduled(schedule: ScheduleName, **options: object) -> TrainerConfig:
    return replace(CONFIG, pipeline=PipelineConfig(schedule=schedule, **options))  # type: ignore[arg-type]


def test_cuts_are_those_that_are_given() -> None:
    stages = stage_layers(scheduled("1f1b", cuts=(5,)), 2)
    assert [list(stage.layers) for stage in stages] == [[0, 1, 2, 3, 4], [5]]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, model=replace(SIX_LAYERS, n_layers=1)), "needs as many layers, but model.n_layers is 1"),
        (replace(CONFIG, accumulation=1), "set accumulation=2 or more"),
        (replace(scheduled("looped-bfs"), accumulation=5), "pass in rounds of mesh.pp 2; use a multiple"),
        (scheduled("1f1b", stages_per_rank=2), "which needs one stage per rank"),
        (scheduled("looped-bfs", stages_per_rank=1), "which needs two or more stages per rank"),
        (scheduled("1f1b", cuts=(1, 2)), "2 stages of 6 layers have 1 cuts"),
        (scheduled("1f1b", cuts=(6,)), "between 1 and 5"),
        (replace(CONFIG, model=replace(SIX_LAYERS, tied_embeddings=True)), "set model.tied_embeddings=false"),
        (replace(CONFIG, gradient_sync="last"), "leave gradient_sync out"),
        (replace(CONFIG, forward_prefetch=1), "set forward_prefetch=0"),
        (replace(scheduled("zbv-zero-bubble"), reshard="always"), "findings/zero_bubble_loses_gradients.py"),
        (replace(scheduled("zbv-zero-bubble"), activation_checkpointing="full"), "use activation_checkpointing none"),
        (replace(scheduled("gpipe"), mesh=MeshConfig(dp_shard=4)), "pipeline has no effect with mesh.pp 1"),
    ],
)
def test_refused_pipelines(config: TrainerConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked(config)


def test_a_schedule_that_torch_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    checked(replace(CONFIG, mesh=MeshConfig(dp_shard=4)))
    monkeypatch.delattr("torch.distributed.pipelining.ScheduleZBVZeroBubble")
    with pytest.raises(ValueError, match=r"has no torch\.distributed\.pipelining\.ScheduleZBVZeroBubble"):
        checked(scheduled("zbv-zero-bubble"))


def test_the_default_keeps_groups_between_micro_batches() -> None:
    dims = resolve_mesh(CONFIG.mesh, world_size=4)
    assert not any(reshard_policy(CONFIG, dims, CPU).after_forward.values())
    scarce = reshard_policy(replace(CONFIG, reshard="auto", memory_bytes=1), dims, CPU)
    assert all(scarce.after_forward.values())
    assert "auto: always" in scarce.reason
