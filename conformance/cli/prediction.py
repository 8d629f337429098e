"""Memory and traffic of a model of any size on a mesh of any size, from the models that the laws verify.

Parameters, gradients, buffers of collectives and the optimizer follow the memory model that MEM-1 and MEM-3 compare
with measurements, collectives the traffic model of MP-4. Activations are an estimate: what each layer saves for
backward with fused attention and norms, and what its largest product needs in addition.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import msgspec
import torch
from msgspec.structs import replace

from conformance.memory_segment import MemorySegment
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.memory_model import group_bytes, predict, state_bytes
from conformance.oracles.schedule import groups
from conformance.oracles.tp_schedule import local_shapes
from conformance.oracles.traffic import add_up, step_events
from conformance.plan.mesh import Mesh
from conformance.project import PACKAGE
from reference_trainer.config import DataConfig, MeshConfig, ModelConfig, TrainerConfig
from reference_trainer.overrides import override
from reference_trainer.parallel_dims import ParallelDims, check_fits_mesh, resolve_mesh
from reference_trainer.precision import PrecisionName
from reference_trainer.reshard import reshard_policy
from reference_trainer.strict_yaml import convert, load

MODELS = PACKAGE / "models"
_MODES = ("always", "never", "default", "except-last")
_CHOICES = {
    "precision": get_args(PrecisionName),
    "offload": ("none", "cpu"),
    "activation_checkpointing": ("none", "selective", "full"),
}
_FP32_BYTES = 4


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Model, mesh and workload that are to be predicted."""

    model: str
    """Name of a file in `conformance/models`, without `.yaml`."""
    mesh: str
    """Mesh as in matrix.yaml: dp8, dp64-tp8, hsdp2x4."""
    precision: str = "bf16-mp"
    reshard: str = "default"
    """A mode, a number of ranks, or a table of regular expressions as JSON."""
    seq_len: int = 8192
    batch: int = 1
    """Samples of each data-parallel rank and micro-batch."""
    accumulation: int = 1
    offload: str = "none"
    activation_checkpointing: str = "none"
    overrides: Sequence[str] = ()
    """`field=value` laid over the model's file, such as `n_layers=48`."""


class Prediction(msgspec.Struct, frozen=True):
    """Prediction for one rank."""

    parameters: int
    """Number of parameters of the full model."""
    ranks: int
    """Number of ranks of the mesh."""
    state_bytes: int
    """Sharded parameters and optimizer state, in host memory if they are offloaded."""
    buffer_bytes: int
    """RoPE table, which is always on the device."""
    phases: dict[str, dict[str, int]]
    """By phase `peak_bytes` and `end_bytes`, with the buffers and, unless it is offloaded, the state."""
    activation_bytes: int
    """Estimate of the activations that are kept for backward."""
    traffic: list[dict[str, Any]]
    """Collectives that a rank issues in a step: phase, group, kind, dtype, count, nbytes of its inputs."""


def model_names() -> list[str]:
    """Return the names of the models whose shapes are shipped."""
    return sorted(file.name.removesuffix(".yaml") for file in MODELS.glob("*.yaml"))


def prediction(request: Request) -> Prediction:
    """Return memory and traffic of one rank.

    Raises ValueError for an unknown model, mesh or option, and for sizes that the mesh cannot shard.
    """
    config, dims = configuration(request)
    shapes = local_shapes(config.model, tp=dims.tp, tp_rank=0)
    full_shapes = local_shapes(config.model, tp=1, tp_rank=0)
    profile = _profile(config, dims)
    state, buffers = state_bytes(config, dims, shapes), buffer_bytes(config)
    resident = buffers + (state if config.offload == "none" else 0)
    phases = {
        phase: {"peak_bytes": resident + usage.peak_bytes, "end_bytes": resident + usage.end_bytes}
        for phase, usage in predict(config, dims, shapes, profile).items()
    }
    traffic = [
        {"phase": phase, "group": group, "kind": kind, "dtype": dtype, "count": sent.count, "nbytes": sent.nbytes}
        for (phase, group, kind, dtype), sent in sorted(add_up(step_events(config, dims, tp_rank=0)).items())
    ]
    return Prediction(
        parameters=_numel(full_shapes),
        ranks=dims.world_size,
        state_bytes=state,
        buffer_bytes=buffers,
        phases=phases,
        activation_bytes=kept_for_backward(profile),
        traffic=traffic,
    )


def configuration(request: Request) -> tuple[TrainerConfig, ParallelDims]:
    """Return the trainer's configuration, and its degrees of parallelism. Raises ValueError as `prediction` does."""
    if request.model not in model_names():
        raise ValueError(f"unknown model {request.model}: choose from {', '.join(model_names())}")
    model = convert(override(load(MODELS / f"{request.model}.yaml"), request.overrides), ModelConfig)
    for name, choices in _CHOICES.items():
        if getattr(request, name) not in choices:
            raise ValueError(f"{name} {getattr(request, name)}: choose from {', '.join(choices)}")
    mesh = Mesh.parse(request.mesh)
    samples = request.batch * request.accumulation * mesh.dp_replicate * mesh.dp_shard
    fields = {
        "mesh": MeshConfig(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, tp=mesh.tp),
        "data": DataConfig(seq_len=request.seq_len, global_batch_size=samples),
        "precision": request.precision,
        "reshard": _reshard(request.reshard),
        "accumulation": request.accumulation,
        "offload": request.offload,
        "activation_checkpointing": request.activation_checkpointing,
        "model": replace(model, max_seq_len=max(model.max_seq_len, request.seq_len)),
    }
    config = msgspec.convert(msgspec.to_builtins(fields), TrainerConfig)
    if config.precision == "bf16-mixed" or config.model.tied_embeddings:
        raise ValueError("the memory model knows one group for each block: no bf16-mixed and no tied embeddings yet")
    dims = resolve_mesh(config.mesh, world_size=mesh.world_size)
    check_fits_mesh(config, dims)
    reshard_policy(config, dims, torch.device("cpu"))  # what the trainer refuses cannot be predicted
    return config, dims


def _reshard(text: str) -> str | int | dict[str, str | int]:
    """A mode, or as JSON a number of ranks or a table. Raises ValueError for anything else."""
    if text in _MODES:
        return text
    try:
        return msgspec.json.decode(text, type=int | dict[str, Literal["always", "never"] | int])
    except msgspec.DecodeError:
        modes = ", ".join(_MODES)
        table = '{"layers.*": "never"}'
        raise ValueError(f"reshard {text}: choose from {modes}, or write a number of ranks or {table}") from None


def buffer_bytes(config: TrainerConfig) -> int:
    """Return the size of the RoPE table: cosines and sines in fp32."""
    return 2 * config.model.max_seq_len * config.model.head_dim // 2 * _FP32_BYTES


def kept_for_backward(profile: Sequence[MemorySegment]) -> int:
    """Return the bytes of the activations between forward and backward."""
    return next(segment.start_bytes for segment in profile if segment.mark == "backward")


def _numel(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _profile(config: TrainerConfig, dims: ParallelDims) -> list[MemorySegment]:
    """Activations and gradients as a run without FSDP would hold them, group by group."""
    compute = 4 if dtype_policy(config.precision).compute == "float32" else 2
    model = config.model
    tokens = config.data.global_batch_size // (dims.dp * config.accumulation) * config.data.seq_len
    logits = tokens * model.vocab_size * _FP32_BYTES
    names = [group.name for group in groups(config)]
    saved = {name: _saved_bytes(config, dims, tokens, compute) for name in names}
    hidden = tokens * model.dim * compute // dims.tp
    # The embedding's output counts with the first block. The loss keeps logits as computed, and logarithms in fp32.
    saved |= {"tok_embeddings": 0, "output": 2 * hidden + logits * compute // _FP32_BYTES + logits}
    working = dict.fromkeys(names, tokens * max(model.ffn_dim, model.dim) * compute // dims.tp)
    if compute < _FP32_BYTES:
        working["output"] = max(working["output"], logits)  # raised to fp32, before the logarithm
    recomputed = _saved_bytes(replace(config, activation_checkpointing="none"), dims, tokens, compute)
    gradients = _unpadded(config, dims)
    segments, held = [MemorySegment("forward", 0, 0, 0)], 0
    for name in names:
        segments.append(MemorySegment(f"forward {name}", held, held + saved[name] + working[name], held + saved[name]))
        held += saved[name]
        segments.append(MemorySegment(f"after-forward {name}", held, held, held))
    gradients_of_logits = 2 * logits  # of the logarithms and of the logits
    segments.append(MemorySegment("backward", held, held + gradients_of_logits, held))
    for name in reversed(names):
        again = recomputed - saved[name] if name.startswith("layers.") else 0
        done = held - saved[name] + gradients[name]
        segments.append(MemorySegment(f"backward {name}", held, held + again + gradients[name] + working[name], done))
        held -= saved[name]
        segments.append(MemorySegment(f"gradients {name}", done, done, held))
        segments.append(MemorySegment(f"freed {name}", held, held, held))
    return [*segments, MemorySegment("end", held, held, held)] * config.accumulation


def _saved_bytes(config: TrainerConfig, dims: ParallelDims, tokens: int, compute: int) -> int:
    """Activations of one block that are saved for backward.

    Those are inputs and outputs of both norms, queries, keys and values (repeated for each query head), output of
    attention, and four times the hidden layer of the feed-forward (gate, its activation, up, their product).
    """
    model = config.model
    every = 8 * model.dim + 4 * model.ffn_dim
    width = {"none": every, "selective": every // 2, "full": model.dim}[config.activation_checkpointing]
    return tokens * width * compute // dims.tp


def _unpadded(config: TrainerConfig, dims: ParallelDims) -> dict[str, int]:
    unsharded = ParallelDims(dp_replicate=1, dp_shard=1, tp=dims.tp)
    return group_bytes(config, unsharded, local_shapes(config.model, tp=dims.tp, tp_rank=0))
