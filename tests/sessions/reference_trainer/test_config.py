"""Configuration of the trainer: defaults, values that are refused and the messages, and `--set`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from conformance.project import PROJECT
from reference_trainer.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    TrainerConfig,
    load_config,
)
from reference_trainer.mesh import choose_device
from reference_trainer.parallel_dims import ParallelDims, check_fits_mesh, resolve_mesh
from reference_trainer.strict_yaml import parse_scalar

TINY = PROJECT / "reference_trainer" / "configs" / "tiny.yaml"


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - each caller looks at the message
        call()
    return str(caught.value)


REFUSED = """
model.vocab_size=0: model.vocab_size is 0, must be at least 1
model.rope_theta=0.0: model.rope_theta is 0.0, must be positive and finite
model.init_std=-0.1: model.init_std is -0.1, must be finite and not negative
model.dropout=1.0: model.dropout is 1.0, must be at least 0 and below 1
model.dim=130: model.dim 130 is not divisible by n_heads 4
model.dim=132: head dimension 33 (dim / n_heads) must be even for RoPE
model.n_kv_heads=3: model.n_heads 4 is not divisible by n_kv_heads 3
mesh.dp_shard=0: mesh.dp_shard is 0, must be at least 1
data.seq_len=0: data.seq_len is 0, must be at least 1
data.seq_len=512: data.seq_len 512 is longer than model.max_seq_len 128
data.min_valid_fraction=0.0: data.min_valid_fraction is 0.0, must be above 0 and at most 1
optimizer.lr=0.0: optimizer.lr is 0.0, must be positive and finite
optimizer.beta2=1.0: optimizer.beta2 is 1.0, must be at least 0 and below 1
optimizer.momentum=0.9: optimizer.momentum 0.9 has no effect with adamw, which has beta1
optimizer.max_norm=-1.0: optimizer.max_norm is -1.0, must be finite and not negative
optimizer.warmup_steps=-1: optimizer.warmup_steps is -1, must be finite and not negative
optimizer.final_lr_fraction=1.5: optimizer.final_lr_fraction is 1.5, must be at least 0 and at most 1
optimizer.lr_decay_steps=9 optimizer.final_lr_fraction=1.0: optimizer.lr_decay_steps is 9: at least 1, and only with
optimizer.lr_decay_steps=0 optimizer.final_lr_fraction=0.1: optimizer.lr_decay_steps is 0: at least 1
optimizer.norm_type=0.0: optimizer.norm_type is 0.0, must be positive and finite, or "inf"
precision=bf16-mp tf32=true: tf32 has no effect with precision bf16-mp, whose products are not of fp32 numbers: set
loss_scale.initial=3.0: loss_scale.initial is 3.0, must be a power of two, such as 65536.0
loss_scale.initial=-2.0: loss_scale.initial is -2.0, must be a power of two
loss_scale.growth_interval=0: loss_scale.growth_interval is 0, must be at least 1
loss_scale.initial=2.0: loss_scale has no effect with precision fp32: set precision=fp16-mp, or leave it out
precision=fp16-mp optimizer.error_if_nonfinite=true: optimizer.error_if_nonfinite with precision fp16-mp: gradients
pin_memory=true: pin_memory has no effect with offload none: set offload=cpu
norms_in_tp=false: norms_in_tp false leaves norms out of tensor parallelism, but
limit_all_gathers=false: limit_all_gathers false has no effect with fsdp2: set impl
implementation=fsdp1: implementation fsdp1 with init meta: it is for comparison alone; use implementation fsdp2, or init
implementation=fsdp1 init=full reshard=always: it is for comparison alone; use implementation fsdp2, or reshard default
implementation=fsdp1 init=full optimizer.implementation=fused: implementation fsdp1 with optimizer.implementation fused
implementation=fsdp1 init=full optimizer.norm_type="inf": implementation fsdp1 with optimizer.norm_type inf: it is for
accumulation=0: accumulation is 0, must be at least 1
forward_prefetch=-1: forward_prefetch is -1, must be at least 0
precision=bf16-mixed activation_checkpointing=full forward_prefetch=1: forward_prefetch 1: what is recomputed
seed=-1: seed is -1, must be at least 0 and below 2**64
init=checkpoint: init is checkpoint and checkpoint is None: a file is needed with init
checkpoint=weights: init is meta and checkpoint is weights: a file is needed with init
precision=bf16-mixed compile=aot_eager: precision bf16-mixed with compile aot_eager: norms are FSDP groups of their own
activation_checkpointing=selective compile=inductor: activation_checkpointing selective with compile inductor
"""
"""Overrides of the configuration `tiny`, with a part of the message that refuses them."""


@pytest.mark.parametrize("row", REFUSED.strip().splitlines())
def test_values_that_are_refused(row: str) -> None:
    overrides, _, message = row.partition(": ")
    assert message in refusal(lambda: load_config(TINY, overrides.split()))


@pytest.mark.parametrize(
    ("mesh", "world_size", "shape"),
    [
        (MeshConfig(), 1, {"dp_shard": 1}),
        (MeshConfig(), 4, {"dp_shard": 4}),
        (MeshConfig(tp=2), 4, {"dp_shard": 2, "tp": 2}),
        (MeshConfig(dp_replicate=2), 4, {"dp_replicate": 2, "dp_shard": 2}),
        (MeshConfig(dp_replicate=2, dp_shard=2, tp=2), 8, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}),
    ],
)
def test_meshes_that_fit(mesh: MeshConfig, world_size: int, shape: dict[str, int]) -> None:
    dims = resolve_mesh(mesh, world_size=world_size)
    assert dims.mesh_shape() == shape
    assert dims.world_size == world_size


@pytest.mark.parametrize(
    ("mesh", "world_size", "message"),
    [
        (MeshConfig(tp=3), 4, "tp 3 does not fit the number of processes, 4: start 3 processes, or change mesh"),
        (MeshConfig(tp=2), 1, "dp_shard auto x tp 2 does not fit the number of processes, 1: start 2 processes"),
        (MeshConfig(dp_shard=2), 4, "dp_shard 2 x tp 1 does not fit the number of processes, 4: start 2 processes"),
    ],
)
def test_meshes_that_do_not_fit(mesh: MeshConfig, world_size: int, message: str) -> None:
    assert message in refusal(lambda: resolve_mesh(mesh, world_size=world_size))


@pytest.mark.parametrize(
    ("config", "dims", "message"),
    [
        (TrainerConfig(), ParallelDims(1, 1, 8), "model.n_heads 4 is not divisible by mesh.tp 8"),
        (TrainerConfig(), ParallelDims(1, 1, 4), "model.n_kv_heads 2 is not divisible by mesh.tp 4"),
        (TrainerConfig(model=ModelConfig(ffn_dim=7)), ParallelDims(1, 1, 2), "model.ffn_dim 7 is not divisible by"),
        (TrainerConfig(data=DataConfig(seq_len=7)), ParallelDims(1, 1, 2), "data.seq_len 7 is not divisible by"),
        (TrainerConfig(), ParallelDims(1, 3, 1), "data.global_batch_size 8 is not divisible by data-parallel ranks x"),
        (TrainerConfig(accumulation=8), ParallelDims(2, 1, 1), "ranks x accumulation = 2 x 8"),
        (
            TrainerConfig(implementation="fsdp1", init="full"),
            ParallelDims(1, 1, 2),
            "implementation fsdp1 does not shard over mesh.dp_shard 1: use more ranks",
        ),
        (
            TrainerConfig(gradient_sync="all-reduce-last"),
            ParallelDims(1, 2, 1),
            "gradient_sync all-reduce-last needs replicas (HSDP), whose all-reduce it postpones, but mesh.dp_replicate "
            "is 1: set mesh.dp_replicate above 1, or use gradient_sync each or last",
        ),
    ],
)
def test_what_does_not_go_with_the_mesh(config: TrainerConfig, dims: ParallelDims, message: str) -> None:
    assert message in refusal(lambda: check_fits_mesh(config, dims))


def test_an_odd_sequence_length_is_fine_without_sequence_parallelism() -> None:
    check_fits_mesh(TrainerConfig(data=DataConfig(seq_len=7), sequence_parallel=False), ParallelDims(1, 1, 2))


@pytest.mark.parametrize(
    ("device", "devices", "environment", "message"),
    [
        ("cuda", 0, {}, "device is cuda, but torch finds no CUDA device: use device=cpu"),
        ("auto", 2, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "4 processes on this node, but torch finds 2 CUDA"),
        ("cuda", 1, {"LOCAL_RANK": "1"}, "2 processes on this node, but torch finds 1 CUDA devices: start one process"),
    ],
)
def test_too_few_cuda_devices(
    device: Any, devices: int, environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert message in refusal(lambda: choose_device(TrainerConfig(device=device)))


def test_without_a_cuda_device_auto_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device(TrainerConfig()) == torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        (" 3 ", 3),
        ("0.001", 0.001),
        ("1e-3", 0.001),
        ("true", True),
        ("null", None),
        ("", None),
        ("a b", "a b"),
        ("'010'", "010"),
        ('"# b: [1]"', "# b: [1]"),
        ("/data/tokens.npy", "/data/tokens.npy"),
    ],
)
def test_one_scalar(text: str, value: object) -> None:
    assert (type(parse_scalar(text)), parse_scalar(text)) == (type(value), value)


@pytest.mark.parametrize(
    "text", ["[1]", "a: b", "- a", "a #b", "#b", "&a 1", "*a", "!!str 1", "---\na", "{", "@a", "\0"]
)
def test_what_is_not_one_scalar(text: str) -> None:
    expected = f"`{text}` is not one plain value: quote a string, and put a list or a table into the file"
    assert refusal(lambda: parse_scalar(text)) == expected


def test_overrides_change_the_fields_they_name() -> None:
    plain = load_config(TINY)
    changed = load_config(TINY, ["mesh.tp=2", "optimizer.lr=0.1", "data.path='1'", "steps=3", "steps=4"])
    assert (plain.mesh.tp, plain.steps) == (1, 300)
    assert (changed.mesh.tp, changed.optimizer.lr, changed.data.path, changed.steps) == (2, 0.1, "1", 4)
    assert changed.model == plain.model


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["mesh..tp=2"], "--set mesh..tp=2: write KEY=VALUE"),
        (["=2"], "--set =2: write KEY=VALUE"),
        (["steps=on"], "--set steps=on: `on` is true in YAML 1.1 and a word in YAML 1.2: write true"),
        (["steps.x=1"], "--set steps.x=1: steps is a value, not a section: write steps=VALUE"),
        (["data.path=2.10"], "--set data.path=2.10: Expected `str | null`, got `float`: put the value in quotes - at"),
        (["optimiser.lr=1"], "--set optimiser.lr=1: unknown field `optimiser`; allowed: model, "),
        (["mesh.tp=2", "mesh.dp_shard=0"], "--set mesh.tp=2 with --set mesh.dp_shard=0: mesh.dp_shard is 0, must be"),
        (["steps=2", "model.dim=130"], f"{TINY}:2 with --set model.dim=130: model.dim 130 is not divisible by"),
    ],
)
def test_errors_of_overrides_name_the_option(overrides: list[str], message: str) -> None:
    assert refusal(lambda: load_config(TINY, overrides)).startswith(message)
