"""Resharding: the groups that the trainer reshards, and to how many ranks."""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from reference_trainer.config import MeshConfig, ModelConfig, OptimizerConfig, TrainerConfig
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import ParallelDims
from reference_trainer.parallelize import parallelize
from reference_trainer.reshard import device_memory_bytes, estimated_peak_bytes, group_names, reshard_policy

CPU = torch.device("cpu")
DIMS = ParallelDims(dp_replicate=1, dp_shard=4, tp=1)
MODEL = ModelConfig(n_layers=3)
NAMES = ["tok_embeddings", "layers.0", "layers.1", "layers.2", "output"]


def policy(reshard: Any, dims: ParallelDims = DIMS, **options: Any) -> list[bool | int]:
    config = TrainerConfig(model=MODEL, reshard=reshard, **options)
    return list(reshard_policy(config, dims, CPU).after_forward.values())


def test_names_of_groups() -> None:
    assert group_names(TrainerConfig(model=MODEL)) == NAMES
    tied = ModelConfig(n_layers=1, tied_embeddings=True)
    assert group_names(TrainerConfig(model=tied, precision="bf16-mixed")) == [
        "layers.0",
        "layers.0.attention_norm",
        "layers.0.ffn_norm",
        "norm",
        "output",
    ]


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


def test_the_last_of_ten_blocks_is_not_the_first() -> None:
    config = TrainerConfig(model=ModelConfig(n_layers=11), reshard="except-last")
    kept = [name for name, after in reshard_policy(config, DIMS, CPU).after_forward.items() if not after]
    assert kept == ["layers.10", "output"]


@pytest.mark.parametrize(
    ("mode", "dims", "message"),
    [
        (
            {r"layers\.9": "never"},
            DIMS,
            r"layers\\.9 matches none of the groups that earlier expressions leave",
        ),
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
    ("fields", "sign"),
    [
        ({"precision": "bf16-mp"}, -1),
        ({"optimizer": OptimizerConfig(name="sgd")}, -1),
        ({"optimizer": OptimizerConfig(name="sgd", momentum=0.9)}, -1),
        ({"offload": "cpu"}, -1),
        ({"activation_checkpointing": "full"}, -1),
        ({"accumulation": 2}, -1),
        ({"model": ModelConfig(n_layers=6)}, 1),
    ],
)
def test_the_estimate_follows_the_configuration(fields: dict[str, Any], sign: int) -> None:
    base = estimated_peak_bytes(TrainerConfig(model=MODEL), DIMS)
    assert sign * (estimated_peak_bytes(TrainerConfig(**{"model": MODEL, **fields}), DIMS) - base) > 0


def test_a_policy_knows_its_groups_and_no_others() -> None:
    chosen = reshard_policy(TrainerConfig(model=MODEL), DIMS, CPU)
    assert chosen.of("layers.2") is True
    assert chosen.of("output") is False
    with pytest.raises(
        ValueError, match=r"no FSDP group is named 'layers.3': the groups are tok_embeddings, layers.0, .*output$"
    ):
        chosen.of("layers.3")


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
