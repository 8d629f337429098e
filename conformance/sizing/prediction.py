"""Memory and traffic of a model of any size on a mesh of any size.

Parameters, gradients, buffers of collectives and the optimizer follow the memory model that MEM-1 and MEM-3 compare
with measurements, collectives the traffic model of MP-4. Activations are estimated, see `activations`.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import msgspec
import torch
from msgspec.structs import replace

from conformance.memory_segment import MemorySegment
from conformance.oracles import memory_walk, pipeline
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.expert_exchange import exchange_events
from conformance.oracles.memory_model import optimizer_bytes, parameter_bytes, predict, state_bytes
from conformance.oracles.schedule import Event
from conformance.oracles.tp_schedule import shards
from conformance.oracles.traffic import add_up, ranks_in, routed_experts, sent_bytes, step_events
from conformance.plan.mesh import Mesh
from conformance.sizing.activations import KEPT, LOGITS, estimated_profile, estimated_stages_profile, kept_for_backward
from conformance.sizing.decoder import Decoder, Experts, Workload
from conformance.sizing.fixed_costs import FixedCost, fixed_costs
from conformance.sizing.models import read_model
from reference_trainer.checks import UsageError, require
from reference_trainer.config import DataConfig, MeshConfig, TrainerConfig
from reference_trainer.observer import Phase
from reference_trainer.parallel_dims import ParallelDims, check_blocks_fit, check_fits_mesh, resolve_mesh
from reference_trainer.pipeline import check_pipeline
from reference_trainer.precision import PRECISIONS, PrecisionName
from reference_trainer.reshard import reshard_policy

RESHARD_MODES = ("never", "except-last", "default", "always")
"""Reshard modes that have a name, from the least communication to the least memory."""
CHECKPOINTING = ("none", "selective", "full")
"""Kinds of activation checkpointing that the trainer runs, from the least recomputation to the least memory."""
KINDS = ("sharded parameters", "optimizer state", *memory_walk.KINDS, "activations", "temporaries")
"""Kinds of memory.

`sharded parameters` include the RoPE table. `temporaries` are results that nothing keeps, activations that are
recomputed, and gradients of activations and of the block that backward computes.
"""
_HALVED = ("interleaved-zero-bubble", "zbv-zero-bubble")
PIPELINES = ("1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", *_HALVED)
"""Schedules of pipelines; all but the first two have two stages on each rank."""
_CHOICES = {
    "pipeline": PIPELINES,
    "precision": tuple(name for name in get_args(PrecisionName) if not PRECISIONS[name].norms_apart),
    "offload": ("none", "cpu"),
    "activation_checkpointing": tuple(KEPT),
    "logits": LOGITS,
    "groups": ("blocks-and-ends", "blocks"),
}
_LARGEST = 2**40
"""Largest number of samples, micro-batches or tokens: their products fit into 64 bits."""
_AFTER_BACKWARD = ("clip", "optimizer", "idle")
_FP32_BYTES = 4


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """Model, mesh and workload to predict."""

    model: str
    """Name of a file in `conformance/sizing/models`, without `.yaml`, or path of a `.yaml` or of a `config.json`."""
    mesh: str
    """Mesh as in matrix.yaml: dp8, dp64-tp8, hsdp2x4, dp64-ep8, dp64-cp8."""
    precision: str = "bf16-mp"
    reshard: str = "default"
    """A mode, a number of ranks, or a table of regular expressions as JSON."""
    seq_len: int = 8192
    batch: int = 1
    """Samples of each data-parallel rank and micro-batch; with `cp` those that its ranks share."""
    accumulation: int = 1
    pipeline: str = "1f1b"
    """Schedule of a mesh with pp, one of `PIPELINES`."""
    offload: str = "none"
    activation_checkpointing: str = "none"
    logits: str = "kept"
    """Use of the model's output by the loop, one of `LOGITS`."""
    loss_parallel: bool = False
    """True if logits stay sharded over tensor parallelism."""
    groups: str = "blocks-and-ends"
    """Grouping of embedding, norm and output, see `TrainerConfig.grouping`."""
    fixed_costs: str | None = None
    """Size such as `2GiB` in place of the ranges of `fixed_costs`."""
    overrides: Sequence[str] = ()
    """`field=value` laid over the model's file, such as `n_layers=48`."""


def reshard_modes(request: Request) -> tuple[str, ...]:
    """Return the reshard modes that have a name and that the trainer runs with the schedule of a request."""
    return ("never", "default") if _is_halved(request) else RESHARD_MODES


def checkpointing_kinds(request: Request) -> tuple[str, ...]:
    """Return the kinds of activation checkpointing that the trainer runs with the schedule of a request."""
    if _is_halved(request):
        return CHECKPOINTING[:1]
    return ("none", "full") if Mesh.parse(request.mesh).ep > 1 else CHECKPOINTING


def _is_halved(request: Request) -> bool:
    return Mesh.parse(request.mesh).pp > 1 and request.pipeline in _HALVED


class PhaseMemory(msgspec.Struct, frozen=True):
    """Memory of one phase on the device, including the state held between steps."""

    peak_bytes: int
    end_bytes: int
    kinds_at_peak: dict[str, int]
    """Bytes at the peak by kind, all of `KINDS`; they add up to `peak_bytes`."""


class PhaseTraffic(msgspec.Struct, frozen=True):
    """Collectives of a rank in one step that have phase, kind, group and dtype in common."""

    phase: str
    kind: str
    group: str
    """Mesh dimension whose ranks take part; `dp_shard/8` for eight of its ranks, which share experts."""
    ranks: int
    """Number of ranks that take part."""
    dtype: str
    count: int
    input_bytes: int
    """Bytes of the rank's inputs."""
    sent_bytes: int
    """Bytes that the rank sends if the ranks are arranged as a ring."""


class ModeOfPipeline(msgspec.Struct, frozen=True):
    """Reshard mode under a pipeline, and its price: memory, or gathers for each micro-batch."""

    reshard: str
    peak_bytes: int
    all_gathers: int
    """All-gathers of FSDP on the rank that needs most memory, in one step."""
    gathered_bytes: int
    """Bytes of the rank's inputs to them."""


class Prediction(msgspec.Struct, frozen=True):
    """Prediction for one rank."""

    parameters: int
    """Number of parameters of the full model."""
    active_parameters: int
    """Number of parameters that a token passes through: of experts those that are active."""
    ranks: int
    """Number of ranks of the mesh."""
    state_bytes: int
    """Sharded parameters and optimizer state, in host memory if they are offloaded."""
    buffer_bytes: int
    """RoPE table, which is always on the device."""
    stage: int
    """Rank of the pipeline that is predicted, the one that needs most; 0 without a pipeline."""
    stage_peaks_bytes: list[int]
    """Peak of each rank of the pipeline."""
    modes: list[ModeOfPipeline]
    """Reshard modes of a pipeline; none without one."""
    phases: dict[str, PhaseMemory]
    """Memory by phase, in the order of time, with the buffers and, unless it is offloaded, the state."""
    activation_bytes: int
    """Estimate of the activations that are kept for backward."""
    traffic: list[PhaseTraffic]
    """Collectives that a rank issues in a step, and transfers between stages (`send`), in the order of phases."""
    fixed_costs: list[FixedCost]
    """Memory of a CUDA device that no phase has."""
    notes: list[str]
    """Assumptions about this model."""


def prediction(request: Request) -> Prediction:
    """Return memory and traffic of one rank.

    Raises UsageError for an unknown model, mesh or option, and for sizes that the mesh cannot shard.
    """
    workload = configuration(request)
    decoder, dims = workload.decoder, workload.dims
    memories = [_stage_memory(workload, stage) for stage in range(dims.pp)]
    peaks = [peak_bytes(memory) for memory in memories]
    stage = peaks.index(max(peaks))
    shapes = stage_shapes(workload, stage)
    return Prediction(
        parameters=decoder.parameters,
        active_parameters=decoder.active_parameters,
        ranks=dims.world_size,
        state_bytes=state_bytes(workload.config, dims, shapes),
        buffer_bytes=buffer_bytes(decoder),
        stage=stage,
        stage_peaks_bytes=peaks,
        modes=[_mode(request, mode) for mode in reshard_modes(request)] if dims.pp > 1 else [],
        phases=memories[stage],
        activation_bytes=kept_for_backward(_profile(workload, stage)),
        traffic=_traffic(workload, stage),
        fixed_costs=fixed_costs(workload, shapes, given=request.fixed_costs),
        notes=_notes(workload),
    )


def stage_shapes(workload: Workload, stage: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes that FSDP shards on a rank of the pipeline, by parameter."""
    local = shards(workload.decoder.shapes(), tp=workload.dims.tp, tp_rank=0)
    return pipeline.held_by(stage, local, workload.config)


def peak_bytes(phases: dict[str, PhaseMemory]) -> int:
    """Return the largest peak of all phases."""
    return max(memory.peak_bytes for memory in phases.values())


def phase_memory(workload: Workload) -> dict[str, PhaseMemory]:
    """Return the memory of each phase on the device of rank 0, which has the largest shards.

    In a pipeline it is the first rank of the stage that needs most.
    """
    return max((_stage_memory(workload, stage) for stage in range(workload.dims.pp)), key=peak_bytes)


def _profile(workload: Workload, stage: int) -> list[MemorySegment]:
    is_pipeline = workload.dims.pp > 1
    return estimated_stages_profile(workload, rank=stage) if is_pipeline else estimated_profile(workload)


def _mode(request: Request, mode: str) -> ModeOfPipeline:
    workload = configuration(replace(request, reshard=mode))
    peaks = [peak_bytes(_stage_memory(workload, stage)) for stage in range(workload.dims.pp)]
    events = _events(workload, peaks.index(max(peaks)))
    gathers = [event for event in events if (event.kind, event.group) == ("all_gather", "dp_shard")]
    return ModeOfPipeline(mode, max(peaks), len(gathers), sum(event.nbytes for event in gathers))


def _stage_memory(workload: Workload, stage: int) -> dict[str, PhaseMemory]:
    config, dims, shapes = workload.config, workload.dims, stage_shapes(workload, stage)
    resident = {"sharded parameters": buffer_bytes(workload.decoder), "optimizer state": 0}
    if config.offload == "none":
        resident["sharded parameters"] += parameter_bytes(config, dims, shapes)
        resident["optimizer state"] = optimizer_bytes(config, dims, shapes)
    itemsize = int(getattr(torch, dtype_policy(config.precision).compute).itemsize)
    received = pipeline.received_numel(config, dims, rank=stage) * itemsize if dims.pp > 1 else 0
    # As in torch up to 2.14. While activations are there the profile has them.
    kept = pipeline.kept_gradients_numel(config, dims, rank=stage) * itemsize if dims.pp > 1 else 0
    usages = predict(config, dims, shapes, _profile(workload, stage), device_only=True)
    buffers = {phase: received + kept * (phase in _AFTER_BACKWARD) for phase in usages}
    return {
        phase: _with_resident(usage, resident | {"communication buffers": buffers[phase]})
        for phase, usage in usages.items()
    }


def _with_resident(usage: memory_walk.Usage, resident: dict[str, int]) -> PhaseMemory:
    nbytes = sum(resident.values())
    kinds = {kind: resident.get(kind, 0) + usage.kinds_at_peak.get(kind, 0) for kind in KINDS}
    return PhaseMemory(nbytes + usage.peak_bytes, nbytes + usage.end_bytes, kinds)


def _events(workload: Workload, stage: int) -> list[Event]:
    full = workload.decoder.shapes()
    return step_events(workload.config, workload.dims, tp_rank=0, pp_rank=stage, full=full)


def _traffic(workload: Workload, stage: int) -> list[PhaseTraffic]:
    """Return collectives by phase, in the order of time; within a phase those of FSDP come first.

    In a ring of attention each rank passes all of its input of an all-to-all on to the next rank.
    """
    config, dims, rows = workload.config, workload.dims, []
    events = _events(workload, stage)
    exchanges = exchange_events(config, dims, mixtures=len(routed_experts(workload.decoder.shapes())))
    rings = [event for event in events if event.is_of_ring]
    others = [event for event in events if not event.is_of_ring]
    for dimension, collectives in ((None, others), ("ep", exchanges), ("cp", rings)):
        for (phase, group, kind, dtype), traffic in add_up(collectives).items():
            ranks = ranks_in(group, dims)
            passes_on = dimension == "cp" and kind == "all_to_all"
            sent = traffic.nbytes if passes_on else sent_bytes(kind, traffic.nbytes, ranks=ranks)
            name = dimension or group
            rows.append(PhaseTraffic(phase, kind, name, ranks, dtype, traffic.count, traffic.nbytes, sent))
    rows += _transfers(config, dims, stage) if dims.pp > 1 else []
    order = get_args(Phase)
    return sorted(rows, key=lambda row: order.index(row.phase))


def _transfers(config: TrainerConfig, dims: ParallelDims, stage: int) -> list[PhaseTraffic]:
    """Return the activations and gradients that a rank sends to its neighbours in the pipeline."""
    dtype = dtype_policy(config.precision).compute
    nbytes = pipeline.activation_numel(config, dims) * int(getattr(torch, dtype).itemsize)
    rows = []
    for phase in ("forward", "backward"):
        actions = [action for action in pipeline.order(config, rank=stage) if action.kind.startswith(phase)]
        if count := pipeline.sends(actions, config):
            rows.append(PhaseTraffic(phase, "send", "pp", 2, dtype, count, count * nbytes, count * nbytes))
    return rows


def configuration(request: Request) -> Workload:
    """Return the model, and how it is trained. Raises UsageError as `prediction` does."""
    model = read_model(request.model, request.overrides)
    decoder = replace(model, max_seq_len=max(model.max_seq_len, request.seq_len))
    for name in ("batch", "accumulation", "seq_len"):
        given = getattr(request, name)
        require(given <= _LARGEST, f"{name} {given}: at most {_LARGEST}")
    for name, choices in _CHOICES.items():
        if getattr(request, name) not in choices:
            raise UsageError(f"{name} {getattr(request, name)}: choose from {', '.join(choices)}")
    mesh = Mesh.parse(request.mesh)
    samples = request.batch * request.accumulation * mesh.dp_replicate * mesh.dp_shard // mesh.cp
    fields = {
        "mesh": MeshConfig(
            pp=mesh.pp,
            dp_replicate=mesh.dp_replicate,
            dp_shard=mesh.dp_shard,
            tp=mesh.tp,
            ep=mesh.ep,
            cp=mesh.cp,
        ),
        "data": DataConfig(seq_len=request.seq_len, global_batch_size=samples),
        "precision": request.precision,
        "reshard": _reshard(request.reshard),
        "accumulation": request.accumulation,
        "offload": request.offload,
        "loss_parallel": request.loss_parallel,
        "pipeline": {"schedule": request.pipeline} if mesh.pp > 1 else {},
        "activation_checkpointing": request.activation_checkpointing.removesuffix("-op"),
        "grouping": request.groups,
        "model": decoder.skeleton(ep=mesh.ep),
    }
    _require_modelled(decoder, request, mesh)
    try:
        config = msgspec.convert(msgspec.to_builtins(fields), TrainerConfig)
    except msgspec.ValidationError as error:
        raise UsageError(str(error)) from None
    dims = resolve_mesh(config.mesh, world_size=mesh.world_size)
    for sizes in (decoder, *decoder.sizes_of_experts()):
        check_blocks_fit(sizes, tp=dims.tp)
    check_fits_mesh(config, dims)
    check_pipeline(config, dims)
    require(
        dims.pp == 1 or request.reshard in RESHARD_MODES,
        f"reshard {request.reshard} with mesh {request.mesh}: in a pipeline choose from {', '.join(RESHARD_MODES)}",
    )
    reshard_policy(config, dims, torch.device("cpu"))  # refuses what the trainer refuses
    return Workload(decoder, config, dims, request.activation_checkpointing, request.logits)


def _require_modelled(decoder: Decoder, request: Request, mesh: Mesh) -> None:
    require(
        mesh.ep == 1 or decoder.experts is not None,
        f"{request.model} with mesh {request.mesh}: the model has no experts that ep could divide; use a mesh without "
        "ep",
    )
    lacking = [name for name in ("latents", "sinks") if getattr(decoder, name)]
    lacking += ["biases of experts"] if "experts" in decoder.biases else []
    structure = f"{request.model} with mesh {request.mesh}: tensor parallelism of {', '.join(lacking)} is not modelled"
    require(mesh.tp == 1 or not lacking, f"{structure}; use a mesh without tp")
    _require_modelled_ring(decoder, request, mesh)
    if request.activation_checkpointing != "selective-op":
        return
    lacking = [name for name in ("experts", "biases") if getattr(decoder, name)]
    require(
        not lacking and mesh.tp == 1,
        f"activation checkpointing selective-op with {', '.join([*lacking, *(['tp'] if mesh.tp > 1 else [])])}: "
        "torchtitan's policy then counts other operators, which are not modelled; use selective or full",
    )


def _require_modelled_ring(decoder: Decoder, request: Request, mesh: Mesh) -> None:
    require(
        mesh.cp == 1 or decoder.experts is None,
        f"mesh {request.mesh}: the trainer refuses mesh.cp with model.n_experts, so that no measurement could be "
        "compared with a prediction; use a mesh without cp",
    )
    lacking = [name for name in ("latents", "sinks") if mesh.cp > 1 and getattr(decoder, name)]
    require(
        not lacking,
        f"{request.model} with mesh {request.mesh}: context parallelism of {', '.join(lacking)} is not modelled; use a "
        "mesh without cp",
    )


def _notes(workload: Workload) -> list[str]:
    decoder = workload.decoder
    notes = [f"Not counted of this model: {missing}." for missing in decoder.not_counted]
    return [*notes, *_notes_on_experts(decoder.experts, workload.dims)] if decoder.experts else notes


def _notes_on_experts(experts: Experts, dims: ParallelDims) -> Iterator[str]:
    here, ranks = experts.number // dims.ep, dims.dp_shard // dims.ep
    held = -(-here // ranks)
    if dims.ep > 1:
        yield (
            f"Each of {dims.ep} ranks has {here} experts of a block, as an FSDP group of their own over the {ranks} "
            "ranks with the same ones; tokens are spread evenly over experts, and no rank gets more than others."
        )
    else:
        yield (
            "Experts are sharded by FSDP alone, without expert parallelism, and a block gathers all of its experts; "
            "tokens are spread evenly over them."
        )
    if held * ranks > here:
        yield (
            f"FSDP shards stacked experts by expert: {here} over {ranks} ranks leave {ranks - -(-here // held)} ranks "
            f"without any, and pad buffers to {held * ranks}. A shard_placement_fn for dimension 1 avoids that."
        )


def _reshard(text: str) -> str | int | dict[str, str | int]:
    """Return a mode, or from JSON a number of ranks or a table. Raises UsageError for anything else."""
    if text in RESHARD_MODES:
        return text
    try:
        return msgspec.json.decode(text, type=int | dict[str, Literal["always", "never"] | int])
    except msgspec.DecodeError:
        modes = ", ".join(RESHARD_MODES)
        table = '{"layers.*": "never"}'
        raise UsageError(f"reshard {text}: choose from {modes}, or write a number of ranks or {table}") from None


def buffer_bytes(decoder: Decoder) -> int:
    """Return the size of the RoPE table: cosines and sines in fp32."""
    return 2 * decoder.max_seq_len * decoder.rope_width // 2 * _FP32_BYTES
