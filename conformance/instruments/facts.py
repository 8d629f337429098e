"""Facts that instruments leave of one rank's training run: the content of `record.json`.

Builtin types throughout and no torch, so that processes which only read records can do without it. The instruments
that measure each fact are named beside it.
"""

import msgspec

from conformance.instruments.communication import Communication

UNKNOWN = "UNKNOWN"
"""Reduction operation that torch does not tell."""
FULL_LAYOUT = "full"
"""Stands for the layout of a tensor that is not sharded."""


class StepFacts(msgspec.Struct, frozen=True):
    """Metrics of one step as the trainer reports them; JSON writes numbers that are not finite as null."""

    step: int
    loss: float | None
    grad_norm: float | None
    valid_tokens: int
    lr: float
    loss_scale: float = 1.0
    skipped: bool = False


class ParameterFacts(msgspec.Struct, frozen=True):
    """Layout of one sharded parameter."""

    group: str
    """Module below which FSDP manages the parameter."""
    shape: list[int]
    """Global shape."""
    shard_dims: dict[str, int]
    """Mesh dimension to the tensor dimension that it shards; mesh dimensions that replicate are left out."""


class OptimizerGroup(msgspec.Struct, frozen=True):
    """Parameter group of the optimizer."""

    weight_decay: float
    lr: float
    parameters: list[str]
    """Names in the model; `?` for a tensor that is none of the model's sharded parameters."""
    steps: list[float]
    """Step counters of the group's parameters, each number once; empty if the optimizer does not count."""


class Collective(msgspec.Struct, frozen=True):
    """Collective issued by one rank."""

    step: int
    phase: str
    """See `reference_trainer.observer.Phase`."""
    kind: str
    """`all_gather`, `reduce_scatter`, `all_reduce`, ..."""
    group: str
    """Mesh dimension whose ranks take part, such as `dp_shard`; `dp_shard/2` for two of its ranks; else the ranks."""
    numel: int
    """Elements of this rank's input."""
    nbytes: int
    """Bytes of this rank's input."""
    dtype: str
    """As on the wire."""
    reduce_op: str | None
    """`SUM`, `AVG`, `MAX`, ... for reductions; `UNKNOWN` where torch does not tell."""
    during: str = ""
    """In forward: the module sharded by FSDP, other than the root, that was entered last."""


class CompilationFacts(msgspec.Struct, frozen=True):
    """Number of block forward passes by how they ran, in all steps and micro-batches; recomputation is not counted."""

    graphs: int
    """Different compiled graphs among those that ran."""
    compiled: int
    """Forward passes of a block that ended in a compiled graph."""
    eager: int
    """Forward passes of a block that did not."""


class RankFacts(msgspec.Struct, frozen=True):
    """Measurements of one rank in one training run."""

    rank: int
    variables: dict[str, str | None]
    """Environment variables as they were before the process group was made."""
    expandable_segments: bool | None
    """See `device_memory.expandable_segments`."""
    mesh_coordinate: dict[str, int]
    steps: list[StepFacts]
    step_s: list[float]
    """See `timing.StepTimes`."""
    calibration_s: float
    """Time of a fixed piece of work after the last step, see `timing.calibration_s`."""
    communication: Communication | None
    """Communication in the step that was profiled, if any."""
    parameters: dict[str, ParameterFacts]
    collectives: list[Collective]
    """In the order in which this rank issued them."""
    reshard_after_forward: dict[str, bool | int]
    """Argument of `fully_shard` by group."""
    backward_prefetch: dict[str, list[str]]
    """See `prefetching.backward_prefetch_of`."""
    unsharded: dict[str, list[str]]
    """See `residency.Residency.unsharded`."""
    dtypes: dict[str, list[str]]
    """See `dtypes.DtypeAudit`."""
    rope_tables: dict[str, list[str]]
    """See `dtypes.DtypeAudit.rope_tables`."""
    places: dict[str, list[str]]
    """See `dtypes.DtypeAudit.places`."""
    offloading: dict[str, str]
    """See `offloading.offloading_of`."""
    optimizer_groups: list[OptimizerGroup]
    """As they are after the last step."""
    operators: dict[str, dict[str, int]]
    """See `operators.OperatorCount.facts`."""
    blocks: CompilationFacts
    checkpoint: str | None
    """File or directory that the weights were loaded from; None if they were sampled."""
    checkpoint_format: str | None
    """Recognised format of the checkpoint, see `reference_trainer.weights.Format`."""
    poisoned: dict[str, int]
    """Elements by tensor that were filled with poison, see `poison.Poison`."""
    materialized: list[int]
    """Elements that each call of `to_empty` materialised, see `poison.Poison`."""
    noticed_poison: dict[str, int]
    """See `poison.Poison.noticed`."""
    shared_parameters: dict[str, list[list[str]]]
    """Names of parameters that are one object, when the model is `initialized` and when training is `final`."""
    surviving_poison: dict[str, int]
    """Elements by tensor that initialisation did not overwrite."""
    fingerprints: dict[str, str]
    """See `capture.Capture`."""
    layouts: dict[str, str]
    """See `capture.Capture.layouts`."""
    batches: list[dict[str, str]]
    """Digests of this rank's `inputs` and `labels` by step."""
    model_inputs: list[str]
    """See `model_inputs.ModelInputs.digests`."""
