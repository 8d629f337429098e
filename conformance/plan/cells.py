"""Cells: the points of the matrix, each a complete trainer configuration with a stable, readable id."""

import re
import sys
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from conformance.plan.mesh import AxisError, Mesh
from conformance.plan.workload import trainer_config
from reference_trainer.config import TrainerConfig
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
    model: Literal["tiny", "even", "uneven", "uneven-tp", "integer", "cut", "deep", "half", "wide"] = "tiny"
    """Name of the workload.

    `tiny`: the usual one. `even`: all sizes divide evenly. `uneven`, `uneven-tp`: shards differ in size over data-
    parallel ranks, or over both kinds of ranks. `integer`: computes with small integers, exactly. `cut`: has enough
    layers for a pipeline, of which its stages do not have equally many. `deep`: so many layers that one layer or one
    parameter is small compared with the model. `half`: as deep, with half of the layers. `wide`: can be sharded over
    1024 ranks."""
    optimizer: Literal["adamw", "sgd", "adamw-foreach", "adamw-fused", "sgd-momentum"] = "adamw"
    """Optimizer, in the implementation that torch chooses: foreach on a CUDA device, a loop on the CPU.

    `adamw-foreach`, `adamw-fused`: AdamW in that implementation on every device. `sgd-momentum`: SGD with momentum."""
    clip: Annotated[float, Meta(ge=0.0, le=sys.float_info.max)] = 1.0
    """Maximum norm of the gradients; 0.0: no clipping."""
    norm_type: Literal["2", "1", "3", "inf"] = "2"
    """Order of the norm by which gradients are clipped."""
    foreach_clip: bool = True
    """True if clipping works on lists of tensors (`foreach`), False if on one tensor after the other."""
    accumulation: Literal[1, 2, 4] = 1
    """Number of micro-batches per step."""
    pipeline: Literal[
        "1f1b", "gpipe", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv-zero-bubble"
    ] = "1f1b"
    """Schedule of a pipeline, on a mesh that has one; `gpipe` and `1f1b` have one stage on each rank, others two."""
    forward_prefetch: Literal[0, 1, 2] = 0
    """Number of groups that a group prefetches in forward; 0: FSDP's default, which is none."""
    backward_prefetch: Literal[0, 1, 2] = 0
    """Number of groups that a group prefetches in backward; 0: FSDP's default, which is one."""
    gradient_sync: Literal["each", "last", "all-reduce-last"] = "each"
    """Micro-batches after which gradients are reduced; `all-reduce-last` postpones the all-reduce of HSDP alone."""
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
    """True if the blocks are compiled: on devices by inductor, on the CPU as `workload.compile_backend` says."""
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
    """Numbers of samples of the ranks' batches; `uneven`: ranks with odd numbers have half as many as the others.

    Only other people's trainers get `uneven` batches: those of ours differ in the number of valid tokens."""
    steps: Annotated[int, Meta(ge=1)] = 3
    """Number of optimizer steps."""
    seed: Annotated[int, Meta(ge=0)] = 0
    """Seed of weights, data and dropout."""

    def __post_init__(self) -> None:
        for name, value in msgspec.structs.asdict(self).items():
            msgspec.structs.force_setattr(self, name, axis_value(name, value))

    @cached_property
    def id(self) -> str:
        """Readable, stable and unique name of this cell, in `[a-z0-9_.+-]`."""
        tags = [
            tag(getattr(self, name))
            for name, tag in _TAGS.items()
            if name in _ALWAYS_IN_ID or getattr(self, name) != _AXES[name].default
        ]
        return "-".join(tags)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return Mesh.parse(self.mesh).world_size

    @cached_property
    def config(self) -> TrainerConfig:
        """Complete configuration of the trainer, see `workload.trainer_config`."""
        return trainer_config(self)

    @property
    def saver(self) -> "Cell":
        """Cell whose run saves the state that this cell's run resumes.

        On another mesh, what only some meshes can do is left out.
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
        return cell_from_axes({**msgspec.structs.asdict(self), **changes})

    def facts(self) -> Mapping[str, AxisValue]:
        """Return the facts that a selection can ask for: id, axes, `features`, and sizes that follow from the mesh."""
        return self._facts

    @cached_property
    def _facts(self) -> Mapping[str, AxisValue]:
        mesh = Mesh.parse(self.mesh)
        return {
            "id": self.id,
            **msgspec.structs.asdict(self),
            "world": mesh.world_size,
            "dp_replicate": mesh.dp_replicate,
            "dp_shard": mesh.dp_shard,
            "dp": mesh.dp_replicate * mesh.dp_shard,
            "tp": mesh.tp,
            "pp": mesh.pp,
            "features": self.features,
        }

    @property
    def features(self) -> int:
        """Number of axes with another value than their default; mesh and seed do not count."""
        return sum(getattr(self, name) != axis.default for name, axis in _AXES.items() if name not in ("mesh", "seed"))


_AXES = {field.name: field for field in msgspec.structs.fields(Cell)}
_ALWAYS_IN_ID = ("mesh", "precision", "reshard", "init")
_ON_ANY_MESH: dict[str, AxisValue] = {
    "reshard": "default",
    "pipeline": "1f1b",
    "gradient_sync": "each",
    "sequence_parallel": True,
    "norms_in_tp": True,
    "loss_parallel": False,
}
# How an id spells the value of each axis. A float is spelled by repr, which no two floats share.
_TAGS: dict[str, Callable[[Any], str]] = {
    "mesh": str,
    "precision": lambda precision: precision.replace("-", ""),
    "loss_scale": str,
    "tf32": lambda _: "tf32",
    "reshard": lambda mode: mode.replace("-", ""),
    "init": str,
    "weights": str,
    "model": lambda model: model.replace("-", ""),
    "optimizer": lambda name: name.replace("-", ""),
    "clip": lambda norm: f"clip{norm!r}" if norm else "noclip",
    "norm_type": lambda order: f"norm{order}",
    "foreach_clip": lambda _: "cliploop",
    "accumulation": lambda count: f"acc{count}",
    "pipeline": lambda schedule: schedule.replace("-", ""),
    "forward_prefetch": lambda count: f"fpre{count}",
    "backward_prefetch": lambda count: f"bpre{count}",
    "gradient_sync": lambda mode: f"sync{mode.replace('-', '')}",
    "offload": lambda device: f"offload{device}",
    "pin_memory": lambda _: "pinned",
    "record_streams": lambda value: f"avoidrs{value}",
    "expandable_segments": lambda value: f"expseg{value}",
    "sequence_parallel": lambda _: "nosp",
    "norms_in_tp": lambda _: "normsdp",
    "loss_parallel": lambda _: "lp",
    "activation_checkpointing": lambda mode: f"ac{mode}",
    "compile": lambda _: "compile",
    "tied_embeddings": lambda _: "tied",
    "dropout": lambda probability: f"drop{probability!r}",
    "schedule": str,
    "saved_on": lambda mesh: f"from.{mesh.replace('-', '.')}",
    "saving": str,
    "implementation": str,
    "limit_all_gathers": lambda _: "nolimit",
    "batches": str,
    "steps": lambda count: f"steps{count}",
    "seed": lambda seed: f"seed{seed}",
}
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
    """Return the allowed values of an axis that lists them; none for a number, a bool, a mesh, and what is no axis."""
    type_ = _AXES[name].type if name in _AXES else None
    return get_args(type_) if get_origin(type_) is Literal else ()


def axis_value(name: str, value: object) -> AxisValue:
    """Return the value in the type of the axis: an int becomes a float where the axis is one.

    Raises AxisError, with what is allowed, for an unknown axis or a value that it does not have.
    """
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


def cell_from_axes(axes: Mapping[str, object]) -> Cell:
    """Return the cell with these values and the defaults of all other axes; raises AxisError as `axis_value` does."""
    values: dict[str, Any] = {name: axis_value(name, value) for name, value in axes.items()}
    return Cell(**values)


def cell_from_id(cell_id: str) -> Cell:
    """Return the cell that has this id; raises AxisError if none has."""
    match = _id_pattern().fullmatch(cell_id)
    tags = {name: tag for name, tag in (match.groupdict() if match else {}).items() if tag is not None}
    try:
        cell = cell_from_axes({name: _value_of_tag(name, tag) for name, tag in tags.items()})
    except ValueError as error:
        raise AxisError(f"no cell has the id {cell_id!r}: {error}") from None
    if cell.id != cell_id:
        raise AxisError(f"no cell has the id {cell_id!r}: see `python -m conformance list` for those of the matrix")
    return cell


@cache
def _id_pattern() -> re.Pattern[str]:
    """Pattern of all ids, with a group for each axis; ids of no cell may match it too."""
    pattern = ""
    for name in _TAGS:
        tags = _OPEN_TAGS[name][0] if name in _OPEN_TAGS else "|".join(map(re.escape, _tags_of_choices(name)))
        separator = "-" if pattern else ""
        pattern += f"{separator}(?P<{name}>{tags})" if name in _ALWAYS_IN_ID else f"(?:{separator}(?P<{name}>{tags}))?"
    return re.compile(pattern)


def _value_of_tag(name: str, tag: str) -> AxisValue:
    return _OPEN_TAGS[name][1](tag) if name in _OPEN_TAGS else _tags_of_choices(name)[tag]


def _tags_of_choices(name: str) -> dict[str, AxisValue]:
    """Values of an axis that lists them, or is a bool, by the tags that stand for them in ids."""
    choices = axis_choices(name) or (False, True)
    in_ids = [value for value in choices if name in _ALWAYS_IN_ID or value != _AXES[name].default]
    return {_TAGS[name](value): value for value in in_ids}
