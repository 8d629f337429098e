"""Facts about one rank's training run, which instruments leave in `record.json`.

All are of builtin types, and nothing here imports torch: processes that only read records do without it. The docstring
of a field gives its meaning; the instrument that it names explains the keys.
"""

from collections.abc import Sequence

import msgspec

from conformance.instruments.communication import Communication

UNKNOWN = "UNKNOWN"
"""Name of a reduction operation that torch does not expose."""
FULL_LAYOUT = "full"
"""Layout of a tensor that is not sharded, in place of a fingerprint."""


class StepFacts(msgspec.Struct, frozen=True):
    """Metrics of one step as the trainer reports them, see `reference_trainer.train.StepMetrics`.

    JSON writes numbers that are not finite as null.
    """

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
    """Shape of the full parameter."""
    shard_dims: dict[str, int]
    """Tensor dimension that is sharded, by mesh dimension; mesh dimensions that replicate are left out."""


class OptimizerGroup(msgspec.Struct, frozen=True):
    """Parameter group of the optimizer."""

    weight_decay: float
    lr: float
    parameters: list[str]
    """Names in the model; `?` for a tensor that is not among the model's sharded parameters."""
    steps: Sequence[float | None]
    """Step counters of the group's parameters, each once, None for NaN; empty if the optimizer does not count."""


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
    """Dtype on the wire; `none` for a collective without tensors."""
    reduce_op: str | None
    """`SUM`, `AVG`, `MAX`, ... for reductions; UNKNOWN where torch does not expose it."""
    during: str = ""
    """In forward: the module sharded by FSDP, other than the root, that was entered last."""
    is_of_fsdp: bool = False
    """True if FSDP's own code issued the collective for the model, see `issuers.is_of_fsdp`."""
    is_of_other_model: bool = False
    """True if FSDP's own code issued it for another model, such as a teacher."""


class CompilationFacts(msgspec.Struct, frozen=True):
    """Number of block forward passes by how they ran, in all steps and micro-batches; recomputation is not counted."""

    graphs: int
    """Number of different compiled graphs."""
    compiled: int
    """Forward passes of a block that ended in a compiled graph."""
    eager: int
    """Forward passes of a block that ended outside of compiled graphs."""
    breaks: int
    """Breaks of graphs, as between the modules that FSDP shards where the model is compiled."""


class IssuedOperator(msgspec.Struct, frozen=True):
    """Operator that the host issued on a stream."""

    operator: str
    """Name, such as `fsdp::chunk_cat`."""
    stream: str
    """Name that FSDP has for the stream, such as `all_gather_stream`."""
    stack: list[str]
    """Place where it was issued, innermost first, each frame as `FILE:LINE FUNCTION`."""


class UnorderedOperators(msgspec.Struct, frozen=True):
    """Two operators on different streams that access the same memory, of which at least one writes, in any order."""

    first: IssuedOperator
    """Operator that was issued first."""
    second: IssuedOperator
    reused: bool
    """True if the memory was released in between, and is the second operator's only if the allocator reuses it."""


class StreamFacts(msgspec.Struct, frozen=True):
    """Streams in one step of a run on the CPU or on the simulated device, see `streams.TracedStep`."""

    operators: dict[str, int]
    """Number of operators by stream."""
    waits: int
    """Number of waits of a stream for an event."""
    unordered: list[UnorderedOperators]
    """First pair of each kind, see `happens_before.races`."""


class StageActionFacts(msgspec.Struct, frozen=True):
    """Computation of a stage on one micro-batch, as it begins."""

    step: int
    action: str
    """See `reference_trainer.observer.StageAction`."""
    stage: int
    micro_batch: int
    held: list[int]
    """Micro-batches of which this stage has activations alive, rising."""
    collectives: int
    """Number of collectives of the run before it, see `RankFacts.collectives`."""


class Transfer(msgspec.Struct, frozen=True):
    """Tensor that a rank sends to another rank of its pipeline, or receives."""

    step: int
    """Step; -1 while the model is built."""
    direction: str
    """`send` or `recv`."""
    peer: int
    """Number of the other rank in the process group of the pipeline."""
    numel: int
    dtype: str


class RankFacts(msgspec.Struct, frozen=True):
    """Measurements of one rank in one training run."""

    rank: int
    variables: dict[str, str | None]
    """Environment variables as they were before the process group was made; None if unset."""
    expandable_segments: bool | None
    """True if the caching allocator of the rank's device has expandable segments; None on the CPU."""
    mesh_coordinate: dict[str, int]
    """Coordinate of the rank by mesh dimension."""
    steps: list[StepFacts]
    """Metrics by step."""
    step_s: list[float]
    """Duration of each step, without the work of instruments."""
    calibration_s: float
    """Duration of a fixed amount of work after the last step, see `timing.calibration_s`."""
    communication: Communication | None
    """Communication in the step that was profiled, if any."""
    parameters: dict[str, ParameterFacts]
    """Layouts by parameter."""
    collectives: list[Collective]
    """Collectives in the order in which this rank issued them."""
    reshard_after_forward: dict[str, bool | int]
    """Argument of `fully_shard` by group."""
    backward_prefetch: dict[str, list[str]]
    """Modules that each FSDP module is configured to prefetch, see `fsdp_state.backward_prefetch_of`."""
    unsharded: dict[str, list[str]]
    """Parameters that are unsharded, by step and point in time, see `sharding.Residency`."""
    dtypes: dict[str, list[str]]
    """Names of dtypes by the keys of `dtypes.DtypeAudit`."""
    rope_tables: dict[str, list[str]]
    """Fingerprints of RoPE tables, see `dtypes.DtypeAudit.rope_tables`."""
    places: dict[str, list[str]]
    """Kinds of memory by the keys of `dtypes.DtypeAudit`, see `dtypes.DtypeAudit.places`."""
    gradient_divisors: dict[str, float | None]
    """Number by which each FSDP module divides gradients, see `fsdp_state.gradient_divisors_of`."""
    offloading: dict[str, str]
    """Offloading policy by parameter, see `fsdp_state.offloading_of`."""
    optimizer_groups: list[OptimizerGroup]
    """Parameter groups after the last step."""
    operators: dict[str, dict[str, int]]
    """Number of calls over all steps, by phase and operator such as `aten::addmm`, see `operators.OperatorCount`."""
    operands: list[str]
    """Operands of operators that add up, in the first step; see `operators.Operands.noted`."""
    blocks: CompilationFacts
    """Forward passes of blocks: compiled or not."""
    checkpoint: str | None
    """Path of the loaded weights; None if they were sampled."""
    checkpoint_format: str | None
    """Recognised format of the checkpoint, see `reference_trainer.weights.Format`."""
    poisoned: dict[str, int]
    """Elements on this rank that were filled with poison, by parameter or buffer, see `poison`."""
    materialized: list[int]
    """Number of parameters and buffers that each call of `to_empty` materialised, in order."""
    noticed_poison: dict[str, int]
    """Elements of `poisoned` that were recognised as poison before anything was initialised."""
    shared_parameters: dict[str, list[list[str]]]
    """Names of parameters that are one object, when the model is `initialized` and when training is `final`."""
    surviving_poison: dict[str, int]
    """Elements on this rank that initialisation did not overwrite, by parameter or buffer."""
    fingerprints: dict[str, str]
    """Fingerprints of captured tensors by the keys of `capture.Capture`."""
    layouts: dict[str, str]
    """Fingerprint of `capture.shard_indices` by sharded parameter: ranks where it is equal hold the same elements."""
    batches: list[dict[str, str]]
    """Fingerprints of this rank's `inputs` and `labels` by step."""
    model_inputs: list[str]
    """Fingerprint of the tokens that the model was called with in forward, shape (samples, seq_len), int64, by step.

    Samples are those of all micro-batches of this rank.
    """
    stage_actions: list[StageActionFacts] = []
    """Computations of this rank's stages in their order; none without a pipeline."""
    transfers: list[Transfer] = []
    """Transfers within the pipeline in the order of issue."""
    streams: StreamFacts | None = None
    """Streams and their synchronisation; None where they are not traced: on CUDA devices, and in runs of FSDP1."""
