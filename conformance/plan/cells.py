"""Cells: the points of the matrix, each a complete trainer configuration with a stable, readable id.

`Cell` has the axes; `trainer_config` maps their values to the workload on which the laws are judged.
"""

import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, cached_property, lru_cache
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta
from msgspec.structs import asdict, fields, force_setattr, replace

from conformance.plan.effects import option_effects
from conformance.plan.mesh import AxisError, Mesh
from conformance.plan.workload import (
    DATA,
    DIVISORS,
    FROZEN,
    GLOBAL_BATCH_SIZES,
    INTEGER_DATA,
    INTEGER_LEARNING_RATE,
    LARGE_BATCH_SIZE,
    LARGE_DATA,
    LOSS_SCALE,
    MODELS,
    OPTIMIZERS,
    RESHARD,
    SKIPPED,
)
from reference_trainer.checks import require
from reference_trainer.config import (
    LossScaleConfig,
    MeshConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainerConfig,
)
from reference_trainer.precision import PRECISIONS
from reference_trainer.strict_yaml import allowed, explain

RECORD_STREAMS = "TORCH_NCCL_AVOID_RECORD_STREAMS"
"""Variable of torch 2.1 to 2.14 for NCCL; has an effect up to 2.7 (torch/distributed, PR 150398)."""
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that configure the caching allocator: the first is read from torch 2.9 on, the second by all versions.

Cells set both to the same value, so that precedence does not matter.
https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf"""
AxisValue = str | int | float | bool


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """One point of the matrix.

    The defaults are part of the ids and must never change; `defaults` of matrix.yaml are another matter. Raises
    AxisError for a value that its axis does not have.
    """

    mesh: str = "dp2"
    """Canonical name of the device mesh."""
    precision: Literal[
        "fp32", "bf16-mp", "bf16-init", "bf16-reduce", "bf16-params", "bf16-mixed", "fp16-mp", "fp16-reduce"
    ] = "fp32"
    """Dtypes of master weights, computation and reduction.

    `bf16-mp`: fp32 master weights, computation in bf16, gradients reduced in fp32. `bf16-init`: as bf16-mp, after
    building and initialising in bf16. `bf16-reduce`: gradients reduced in bf16. `bf16-params`: gradients reduced in the
    dtype that torch chooses, see `oracles.dtype_policy`. `bf16-mixed`: norms have fp32 master weights, all other
    parameters bf16. `fp16-mp`: as bf16-mp, but computation in fp16 with a scaled loss. `fp16-reduce`: gradients reduced
    in fp16 too."""
    loss_scale: Literal["fits", "overflows"] = "fits"
    """Initial loss scale of an fp16 precision: one that fits, or one so large that the first steps are skipped."""
    tf32: bool = False
    """True if a CUDA device rounds the factors of fp32 products to TF32."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Scales of float8 products in the blocks: one for a matrix, which is then gathered in float8, or one for a row."""
    reshard: Literal["always", "never", "default", "except-last", "k2", "table", "auto"] = "default"
    """Groups of parameters that are resharded after forward.

    `default`: all groups but norm and output. `except-last`: nor the last block. `k2`: all groups, to shards over two
    ranks. `table`: chosen by regular expressions. `auto`: as few as memory allows."""
    init: Literal["meta", "full", "layerwise", "checkpoint"] = "meta"
    """Way in which the sharded model gets its initial weights."""
    weights: Literal["safetensors", "hf", "dcp", "rank0"] = "safetensors"
    """Format of the weights that init=checkpoint loads.

    `safetensors`: the trainer's. `hf`: Hugging Face's Llama, in several files. `dcp`: torch.distributed.checkpoint.
    `rank0`: the trainer's, read by rank 0 alone and broadcast."""
    model: Literal[
        "tiny", "even", "uneven", "uneven-tp", "integer", "cut", "deep", "half", "wide", "large", "experts"
    ] = "tiny"
    """Name of the workload.

    `tiny`: the usual one. `even`: all sizes divide evenly. `uneven`, `uneven-tp`: shards differ in size over data-
    parallel ranks, or over both kinds of ranks. `integer`: computes with small integers, exactly. `cut`: has enough
    layers for a pipeline, of which its stages do not have equally many. `deep`: so many layers that one layer or one
    parameter is small compared with the model. `half`: as deep, with half of the layers. `wide`: can be sharded over
    1024 ranks. `large`: more tokens, longer rows and larger groups than kernels and collectives take at once.
    `experts`: a router chooses two of eight experts for each token, beside one that sees all."""
    optimizer: Literal["adamw", "sgd", "adamw-foreach", "adamw-fused", "sgd-momentum"] = "adamw"
    """Optimizer, in the implementation that torch chooses: foreach on a CUDA device, a loop on the CPU.

    `adamw-foreach`, `adamw-fused`: AdamW in that implementation on every device. `sgd-momentum`: SGD with momentum."""
    clip: Annotated[float, Meta(ge=0.0, le=sys.float_info.max)] = 1.0
    """Maximum norm of the gradients; 0.0: no clipping."""
    norm_type: Literal["2", "1", "3", "inf"] = "2"
    """Order of the norm by which gradients are clipped."""
    foreach_clip: bool = True
    """True if clipping works on lists of tensors (`foreach`), False if on one tensor after the other."""
    accumulation: Literal[1, 2, 4, 8] = 1
    """Number of micro-batches per step."""
    passes: Literal[1, 2] = 1
    """Number of micro-batches whose forward passes come before a backward of the sum of their losses."""
    pipeline: Literal[
        "1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv-zero-bubble"
    ] = "1f1b"
    """Schedule of a pipeline, on a mesh that has one; `gpipe` and `1f1b` have one stage on each rank, the rest two."""
    forward_prefetch: Literal[0, 1, 2] = 0
    """Number of groups that a group prefetches in forward; 0: FSDP's default, which is none."""
    backward_prefetch: Literal[0, 1, 2] = 0
    """Number of groups that a group prefetches in backward; 0: FSDP's default, which is one."""
    evaluation: Literal["none", "between-micro-batches"] = "none"
    """Forward passes without gradients between the micro-batches of a step."""
    gradient_sync: Literal["each", "last", "all-reduce-last"] = "each"
    """Micro-batches after which gradients are reduced; `all-reduce-last` postpones the all-reduce of HSDP alone."""
    frozen: Literal["none", "embedding", "norms", "block", "thawed"] = "none"
    """Parameters that do not train; `thawed`: those of the first block in the first step alone."""
    skipped: Literal["none", "block", "blocks"] = "none"
    """Blocks that some forward passes leave out: the second in two of three, with `blocks` the first in each fourth."""
    shard_placement: Literal["rows", "columns"] = "rows"
    """Dimension of matrices that FSDP shards, where it can be divided evenly."""
    gradient_divisor: Literal["ranks", "half", "twice"] = "ranks"
    """Number by which FSDP divides sums of gradients: that of data-parallel ranks, or half or twice of it."""
    offload: Literal["none", "cpu"] = "none"
    """Memory of sharded parameters, gradients and optimizer state; `cpu`: host memory."""
    pin_memory: bool = False
    """True if the host memory of offloaded state is page-locked."""
    record_streams: Literal["unset", "0", "1"] = "unset"
    """Value of TORCH_NCCL_AVOID_RECORD_STREAMS in the environment of the ranks."""
    expandable_segments: Literal["unset", "0", "1"] = "unset"
    """Setting `expandable_segments` of the caching allocator, on or off; needs a CUDA device."""
    sequence_parallel: bool = True
    """True if tensor parallelism also shards norms and residuals along the sequence."""
    norms_in_tp: bool = True
    """True if norms take part in tensor parallelism; False, without sequence parallelism, puts them on the dp mesh."""
    loss_parallel: bool = False
    """True if the loss is computed on logits sharded along the vocabulary."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """Operators that each block recomputes in backward; `selective`: all but matrix products and attention."""
    compile: bool = False
    """True if the blocks are compiled: on devices by inductor, on the CPU as `compile_backend` says."""
    compiled: Literal["blocks", "model"] = "blocks"
    """Modules that `compile` compiles: each block, or the model with its embedding, norm and output."""
    tied_embeddings: bool = False
    """True if the output layer shares the weight of the embedding."""
    dropout: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    """Probability of dropping an activation."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Schedule of the learning rate: constant, or warm-up and then cosine decay."""
    saved_on: str = "none"
    """Mesh of a run that saves its state after half of the steps, or `same`; new processes resume it."""
    saving: Literal["blocking", "async"] = "blocking"
    """Way of saving; `async`: the run trains on before any of its state is written."""
    implementation: Literal["fsdp2", "fsdp1"] = "fsdp2"
    """API that shards the model; `fsdp1`: FullyShardedDataParallel, for comparison."""
    limit_all_gathers: bool = True
    """True if the host of an fsdp1 run waits before it issues all-gathers far ahead of the device."""
    batches: Literal["equal", "uneven"] = "equal"
    """Numbers of samples of the ranks' batches; `uneven`: the last ones of a step have half as many on odd ranks.

    Only other people's trainers get `uneven` batches: those of ours differ in the number of valid tokens."""
    steps: Annotated[int, Meta(ge=1)] = 3
    """Number of optimizer steps."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Seed of weights, data and dropout."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            force_setattr(self, name, axis_value(name, value))

    @cached_property
    def id(self) -> str:
        """Readable, stable and unique name of this cell, in `[a-z0-9_.+-]`."""
        values = asdict(self).items()
        return "-".join(_tag(name, v) for name, v in values if name in _ALWAYS_IN_ID or v != _AXES[name].default)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return Mesh.parse(self.mesh).world_size

    @cached_property
    def config(self) -> TrainerConfig:
        """Complete configuration of the trainer, see `trainer_config`."""
        return trainer_config(self)

    @property
    def saver(self) -> "Cell":
        """Cell whose run saves the state that this cell's run resumes.

        On another mesh, axes that only some meshes support have their defaults.
        """
        if self.saved_on == "same":
            return self
        return self.but(mesh=self.saved_on, saved_on="same", **_ON_ANY_MESH)

    @property
    def steps_before_save(self) -> int:
        """Number of steps before the state is saved that this cell's run resumes; 0 if it starts from step 0."""
        return self.steps // 2 if self.saved_on != "none" else 0

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the ranks have before they make their process group."""
        variables: dict[str, str] = {} if self.record_streams == "unset" else {RECORD_STREAMS: self.record_streams}
        if self.expandable_segments != "unset":
            setting = f"expandable_segments:{self.expandable_segments == '1'}"
            variables |= dict.fromkeys(ALLOCATOR_VARIABLES, setting)
        return variables

    def but(self, **changes: AxisValue) -> "Cell":
        """Return a copy with other values; raises AxisError for an unknown axis or value."""
        return cell_from_axes({**asdict(self), **changes})

    def facts(self) -> Mapping[str, AxisValue]:
        """Return the facts that a selection can ask for: id, axes, `features`, and sizes that follow from the mesh."""
        return self._facts

    @cached_property
    def _facts(self) -> Mapping[str, AxisValue]:
        mesh = Mesh.parse(self.mesh)
        return {
            "id": self.id,
            **asdict(self),
            "world": mesh.world_size,
            "dp_replicate": mesh.dp_replicate,
            "dp_shard": mesh.dp_shard,
            "dp": mesh.dp_replicate * mesh.dp_shard,
            "tp": mesh.tp,
            "pp": mesh.pp,
            "ep": mesh.ep,
            "cp": mesh.cp,
            "features": self.features,
        }

    @property
    def features(self) -> int:
        """Number of axes with another value than their default; mesh and seed do not count."""
        return sum(getattr(self, name) != axis.default for name, axis in _AXES.items() if name not in ("mesh", "seed"))


_AXES = {field.name: field for field in fields(Cell)}
_ALWAYS_IN_ID = ("mesh", "precision", "reshard", "init")
_ON_ANY_MESH: dict[str, AxisValue] = {
    "reshard": "default",
    "pipeline": "1f1b",
    "gradient_sync": "each",
    "shard_placement": "rows",
    "gradient_divisor": "ranks",
    "sequence_parallel": True,
    "norms_in_tp": True,
    "loss_parallel": False,
}
_PREFIXES = {
    "float8": "float8",
    "clip": "clip",
    "norm_type": "norm",
    "accumulation": "acc",
    "passes": "passes",
    "forward_prefetch": "fpre",
    "backward_prefetch": "bpre",
    "gradient_sync": "sync",
    "skipped": "skip",
    "gradient_divisor": "div",
    "offload": "offload",
    "record_streams": "avoidrs",
    "expandable_segments": "expseg",
    "activation_checkpointing": "ac",
    "compiled": "compiled",
    "dropout": "drop",
    "saved_on": "from.",
    "steps": "steps",
    "seed": "seed",
}
_NAMES = {"between-micro-batches": "evals"}
"""Spelling of values in an id that are too long for it."""
_SWITCHES = {
    "tf32": "tf32",
    "foreach_clip": "cliploop",
    "pin_memory": "pinned",
    "sequence_parallel": "nosp",
    "norms_in_tp": "normsdp",
    "loss_parallel": "lp",
    "compile": "compile",
    "tied_embeddings": "tied",
    "limit_all_gathers": "nolimit",
}
"""Spelling of axes in an id: prefixes of values, and names of switches that are not at their defaults."""


def _tag(name: str, value: AxisValue) -> str:
    """Return how an id spells the value of an axis. A float is spelled by repr, which no two floats share."""
    if name in _SWITCHES:
        return _SWITCHES[name]
    if name == "clip" and not value:
        return "noclip"
    if value in _NAMES:
        return _NAMES[str(value)]
    text = value.replace("-", {"mesh": "-", "saved_on": "."}.get(name, "")) if isinstance(value, str) else repr(value)
    return _PREFIXES.get(name, "") + text


_NUMBER = "[0-9.e+-]+?"
# Pattern of the tags of axes that do not list their values, and the value of such a tag.
_OPEN_TAGS: dict[str, tuple[str, Callable[[str], AxisValue]]] = {
    "mesh": (".+?", str),
    "clip": (f"noclip|clip{_NUMBER}", lambda tag: float(tag.removeprefix("clip").replace("noclip", "0"))),
    "dropout": (f"drop{_NUMBER}", lambda tag: float(tag.removeprefix("drop"))),
    "saved_on": (r"from\.[a-z0-9.]+", lambda tag: tag.removeprefix("from.").replace(".", "-")),
    "steps": ("steps[0-9]+", lambda tag: int(tag.removeprefix("steps"))),
    "seed": ("seed[0-9]+", lambda tag: int(tag.removeprefix("seed"))),
}


def axis_default(name: str) -> AxisValue:
    """Return the value that an axis has in a cell that does not name it; raises AxisError for an unknown axis."""
    if name not in _AXES:
        raise AxisError(f"unknown axis `{name}`{allowed(name, _AXES)}")
    default: AxisValue = _AXES[name].default
    return default


def axis_names() -> tuple[str, ...]:
    """Return the names of all axes, in the order of `Cell`."""
    return tuple(_AXES)


def axis_choices(name: str) -> tuple[AxisValue, ...]:
    """Return the allowed values of an axis that lists them; empty for numbers, bools, meshes and unknown axes."""
    type_ = _AXES[name].type if name in _AXES else None
    return get_args(type_) if get_origin(type_) is Literal else ()


def axis_value(name: str, value: object) -> AxisValue:
    """Return the value in the type of the axis: an int becomes a float where the axis is one.

    Raises AxisError, with the allowed ones, for an unknown axis or value.
    """
    return _checked_once(name, value) if isinstance(value, AxisValue) else _checked(name, value)


def _checked(name: str, value: object) -> AxisValue:
    if name not in _AXES:
        raise AxisError(f"unknown axis `{name}`{allowed(name, _AXES)}")
    type_ = _AXES[name].type
    try:
        checked: AxisValue = msgspec.convert(value, type_, strict=True)
    except msgspec.ValidationError as error:
        raise AxisError(f"axis `{name}` = {value!r}: {explain(error, value, type_)}") from None
    if name == "mesh" or (name == "saved_on" and checked not in ("none", "same")):
        Mesh.parse(str(checked))
    return checked


_checked_once = lru_cache(maxsize=None, typed=True)(_checked)
"""Check of a value that can be the key of a cache; `True` and `1` are different keys."""


def cell_from_axes(axes: Mapping[str, object]) -> Cell:
    """Return the cell with these values and the defaults of all other axes; raises AxisError as `axis_value` does."""
    values: dict[str, Any] = {name: axis_value(name, value) for name, value in axes.items()}
    return Cell(**values)


def cell_from_id(cell_id: str) -> Cell:
    """Return the cell that has this id; raises AxisError if none has."""
    match = _id_pattern().fullmatch(cell_id)
    tags = {name: tag for name, tag in (match.groupdict() if match else {}).items() if tag is not None}
    try:
        cell = cell_from_axes(
            {n: _OPEN_TAGS[n][1](tag) if n in _OPEN_TAGS else _tags_of_choices(n)[tag] for n, tag in tags.items()}
        )
    except ValueError as error:
        raise AxisError(f"no cell has the id {cell_id!r}: {error}") from None
    if cell.id != cell_id:
        raise AxisError(f"no cell has the id {cell_id!r}: see `python -m conformance list` for those of the matrix")
    return cell


@cache
def _id_pattern() -> re.Pattern[str]:
    """Pattern of all ids, with a group for each axis; ids of no cell may match it too."""
    pattern = ""
    for name in _AXES:
        tags = _OPEN_TAGS[name][0] if name in _OPEN_TAGS else "|".join(map(re.escape, _tags_of_choices(name)))
        separator = "-" if pattern else ""
        pattern += f"{separator}(?P<{name}>{tags})" if name in _ALWAYS_IN_ID else f"(?:{separator}(?P<{name}>{tags}))?"
    return re.compile(pattern)


@cache
def _tags_of_choices(name: str) -> dict[str, AxisValue]:
    """Values of an axis that lists them, or is a bool, by the tags that stand for them in ids."""
    choices = axis_choices(name) or (False, True)
    in_ids = [value for value in choices if name in _ALWAYS_IN_ID or value != _AXES[name].default]
    return {_tag(name, value): value for value in in_ids}


_MAPPED = {
    "model",
    "mesh",
    "pipeline",
    "optimizer",
    "loss_scale",
    "reshard",
    "compile",
    "gradient_divisor",
    "frozen",
    "skipped",
}
_SAME_IN_TRAINER = sorted({*Cell.__struct_fields__} & {*TrainerConfig.__struct_fields__} - _MAPPED)
"""Axes whose values the trainer's configuration has under the same name."""
_AMPLE_MEMORY_BYTES = 2**40
"""Device memory with which `auto` reshards no group."""


def trainer_config(cell: Cell) -> TrainerConfig:
    """Return the complete configuration of a cell's run, on the CPU.

    The checkpoint that init=checkpoint loads is named relative to the run's directory. Raises UsageError for an axis
    value that can have no effect.
    """
    mesh = Mesh.parse(cell.mesh)
    loads = cell.init == "checkpoint"
    require(loads or cell.weights == "safetensors", f"cell {cell.id}: weights {cell.weights} need init checkpoint")
    require(
        cell.saved_on != "none" or cell.saving == "blocking", f"cell {cell.id}: saving {cell.saving} needs saved_on"
    )
    scales = PRECISIONS[cell.precision].scales_loss
    require(
        scales or cell.loss_scale == "fits", f"cell {cell.id}: loss_scale {cell.loss_scale} needs a precision of fp16"
    )
    require(
        cell.loss_scale == "fits" or cell.steps >= 4,
        f"cell {cell.id}: loss_scale {cell.loss_scale} needs at least 4 steps, of which the first are skipped",
    )
    for holds, problem in _effects(cell, mesh):
        require(holds, f"cell {cell.id}: {problem}")
    data = {"integer": INTEGER_DATA, "large": LARGE_DATA}.get(cell.model, DATA)
    return TrainerConfig(
        model=replace(MODELS[cell.model], tied_embeddings=cell.tied_embeddings, dropout=cell.dropout),
        mesh=MeshConfig(**asdict(mesh)),
        pipeline=PipelineConfig(schedule=cell.pipeline),
        data=replace(data, global_batch_size=_global_batch_size(mesh, cell)),
        optimizer=_optimizer(cell),
        loss_scale=LOSS_SCALE[cell.loss_scale] if scales else LossScaleConfig(),
        reshard=RESHARD.get(cell.reshard, cell.reshard),  # type: ignore[arg-type]
        memory_bytes=_AMPLE_MEMORY_BYTES if cell.reshard == "auto" else None,
        frozen=FROZEN[cell.frozen],
        skipped=SKIPPED[cell.skipped],
        gradient_divisor=_gradient_divisor(cell, mesh),
        checkpoint=f"initial.{cell.weights}" if loads else None,
        checkpoint_reader="rank0" if cell.weights == "rank0" else "each-rank",
        compile=compile_backend(mesh) if cell.compile else "none",
        device="cpu",
        **{name: getattr(cell, name) for name in _SAME_IN_TRAINER},
    )


def _effects(cell: Cell, mesh: Mesh) -> Iterator[tuple[bool, str]]:
    """Yield the preconditions for axis values to have an effect, each with the message if it fails."""
    heads = MODELS[cell.model].n_kv_heads
    yield (
        cell.model != "integer" or cell.precision == "fp32",
        "model integer needs precision fp32, which holds its sums",
    )
    if MODELS[cell.model].n_experts:
        yield mesh.pp == 1, "the trainer cuts no model with experts into stages"
        yield not cell.compile, "the data alone tells the number of tokens of each expert, which breaks graphs"
        yield cell.weights != "hf", "a Llama model has no experts"
        yield MODELS[cell.model].n_experts % mesh.ep == 0, f"experts cannot be divided among {mesh.ep} ranks"
    yield bool(MODELS[cell.model].n_experts) or mesh.ep == 1, "a mesh of experts (ep) needs a model that has some"
    yield from option_effects(asdict(cell), mesh)
    yield mesh.pp > 1 or cell.pipeline == "1f1b", f"pipeline {cell.pipeline} needs a mesh with a pipeline (pp)"
    if mesh.pp > 1:
        stages, layers = mesh.pp * (1 if cell.pipeline in ("1f1b", "gpipe") else 2), MODELS[cell.model].n_layers
        yield layers >= stages, f"{stages} stages of a pipeline cannot be cut from {layers} layers"
        yield cell.accumulation >= mesh.pp, f"a pipeline over {mesh.pp} ranks needs as many micro-batches"
        yield not cell.tied_embeddings, "the trainer does not tie weights of different stages"
    yield mesh.tp > 1 or cell.sequence_parallel, "sequence_parallel false needs tensor parallelism"
    yield mesh.tp > 1 or not cell.loss_parallel, "loss_parallel needs tensor parallelism"
    yield heads % mesh.tp == 0, f"{heads} heads of keys cannot be divided among {mesh.tp} tensor-parallel ranks"
    yield (
        cell.accumulation > 1 or cell.gradient_sync == "each",
        f"gradient_sync {cell.gradient_sync} needs accumulation",
    )
    yield (
        cell.accumulation % cell.passes == 0 and (cell.passes == 1 or mesh.pp == 1),
        f"passes {cell.passes} must divide the number of micro-batches, which pass through no pipeline",
    )
    yield (
        cell.accumulation > cell.passes or cell.passes == 1 or cell.gradient_sync == "each",
        f"gradient_sync {cell.gradient_sync} needs several backwards",
    )
    yield (
        cell.evaluation == "none" or (cell.accumulation > 1 and mesh.pp == 1),
        f"evaluation {cell.evaluation} needs micro-batches that follow each other",
    )
    yield cell.frozen == "none" or mesh.pp == 1, f"frozen {cell.frozen} is not for pipelines"
    yield (
        cell.frozen != "thawed" or (cell.precision == "fp32" and cell.steps > 1 and cell.saved_on == "none"),
        "torch forgets the dtype of reductions of groups that begin frozen, and checkpoints lack their state",
    )
    yield cell.skipped == "none" or mesh.pp == 1, f"skipped {cell.skipped} is not for pipelines"
    yield (
        cell.skipped == "none" or not MODELS[cell.model].n_experts,
        f"skipped {cell.skipped}: experts of a block are balanced over all tokens",
    )
    columns = cell.shard_placement == "columns"
    yield mesh.dp_shard > 1 or not columns, "shard_placement columns needs shards"
    yield cell.reshard != "k2" or not columns, "torch cannot gather columns that are resharded to fewer ranks"
    yield (
        cell.gradient_divisor == "ranks" or mesh.dp_shard > 1,
        f"gradient_divisor {cell.gradient_divisor} needs shards: torch divides gradients of one shard twice",
    )
    replicas = mesh.dp_replicate > 1
    yield replicas or cell.gradient_sync != "all-reduce-last", "gradient_sync all-reduce-last needs replicas (hsdp)"
    # The trainer refuses it with inductor, which devices use; a cell must be the same everywhere.
    selective = cell.activation_checkpointing == "selective"
    yield not (cell.compile and selective), "selective activation checkpointing is not compiled by inductor"
    # torch refuses to reshard to as many ranks as there are, and to reshard DTensors of tensor parallelism: see
    # to_sharded_post_forward in torch/distributed/fsdp/_fully_shard/_fsdp_param.py.
    fewer = mesh.tp == 1 and mesh.dp_shard > 2 and mesh.dp_shard % 2 == 0
    yield fewer or cell.reshard != "k2", "reshard k2 needs a multiple of 2 above 2 of shards, and no tensor parallelism"
    yield cell.batches == "equal", f"batches {cell.batches} are for other people's trainers"
    yield cell.saved_on != cell.mesh, f"saved_on {cell.saved_on} is the mesh itself: write `same`"
    if cell.saved_on not in ("none", "same"):
        saves = Mesh.parse(cell.saved_on)
        yield heads % saves.tp == 0, f"{heads} heads of keys cannot be divided among {saves.tp} ranks that save"
        sizes = [_global_batch_size(each, cell) for each in (saves, mesh)]
        yield (
            sizes[0] == sizes[1],
            f"saved_on {cell.saved_on} has a global batch of {sizes[0]} samples, mesh {cell.mesh} of {sizes[1]}: the "
            "trainer resumes a run with its own data only",
        )


def _global_batch_size(mesh: Mesh, cell: Cell) -> int:
    """Return the smallest of the usual sizes that the micro-batches divide; in large worlds each has one sample.

    With the model `large` every rank has as many.
    """
    if cell.model == "large":
        return LARGE_BATCH_SIZE * mesh.dp_replicate * mesh.dp_shard
    micro_batches = mesh.dp_replicate * mesh.dp_shard * cell.accumulation
    return next((size for size in GLOBAL_BATCH_SIZES if size % micro_batches == 0), micro_batches)


def _gradient_divisor(cell: Cell, mesh: Mesh) -> float | None:
    factor = DIVISORS.get(cell.gradient_divisor)
    return None if factor is None else factor * mesh.dp_replicate * mesh.dp_shard


def _optimizer(cell: Cell) -> OptimizerConfig:
    optimizer = replace(
        OPTIMIZERS[cell.optimizer],
        max_norm=cell.clip,
        norm_type="inf" if cell.norm_type == "inf" else float(cell.norm_type),
        foreach_clip=cell.foreach_clip,
    )
    if cell.schedule == "cosine":
        # The same schedule for runs of any length: CKPT-2 compares with a run that ends where another one was saved.
        optimizer = replace(optimizer, warmup_steps=1, lr_decay_steps=4, final_lr_fraction=0.1)
    return replace(optimizer, lr=INTEGER_LEARNING_RATE, weight_decay=0.0) if cell.model == "integer" else optimizer


def compile_backend(mesh: Mesh) -> Literal["inductor", "aot_eager"]:
    """Return the backend for `torch.compile` on the CPU; inductor needs a C++ compiler."""
    has_compiler = any(map(shutil.which, ("c++", "g++", "clang++")))
    return "inductor" if has_compiler and is_compiled_by_inductor(mesh) else "aot_eager"


def compiled_on_device(config: TrainerConfig) -> TrainerConfig:
    """Return the configuration of ranks that have their own devices, where inductor compiles the blocks."""
    return config if config.compile == "none" else replace(config, compile="inductor")


def is_compiled_by_inductor(mesh: Mesh) -> bool:
    """Return whether a machine with a C++ compiler uses inductor: on one rank.

    Each rank generates and compiles all kernels, although they depend neither on the number nor on the work of other
    ranks: two ranks on two processors take 15 s, eight take 50 s. aot_eager traces and differentiates in the same
    way, in a fifth of the time.
    """
    return mesh.world_size == 1
