"""Facts of subjects, which ranks and the reference leave for the laws. All are of builtin types."""

import msgspec

from conformance.instruments.collective_use import UseOfCollective
from conformance.instruments.facts import Collective, StreamFacts
from conformance.instruments.fsdp_state import GroupSettings
from conformance.instruments.taps import Line
from conformance.report.trainer import Ingredient
from conformance.subjects.cells import Accumulation, DeviceType, SubjectCell, Workload


class ShardedParameter(msgspec.Struct, frozen=True):
    """Layout of one parameter on one rank."""

    shape: list[int]
    """Shape of the full parameter."""
    local_numel: int
    """Number of elements of this rank's shard, before FSDP pads it."""
    dtype: str
    is_dtensor: bool
    shard_ranks: list[list[int]]
    """Ranks among which the parameter is sharded, for each mesh dimension that shards it."""
    replica_ranks: list[list[int]]
    """Ranks that hold copies, for each mesh dimension that does not shard the parameter."""
    is_trained: bool
    is_cut_in_rows: bool = True
    """True unless the parameter is sharded along a dimension other than the first."""
    is_below_fsdp: bool = False
    """True if FSDP2 shards a module above: of that module's parameters it leaves out those in `ignored_params`."""
    fsdp_ranks: list[list[int]] = []
    """Groups of `shard_ranks` among which FSDP2 shards the parameter. While its module computes, it is sharded among
    the other groups alone, as in expert and tensor parallelism. All groups if the module does not compute."""
    fsdp_replica_ranks: list[list[int]] = []
    """Groups of `replica_ranks` over which FSDP2 reduces the parameter's gradient."""

    @property
    def is_ignored(self) -> bool:
        """True for one of the `ignored_params` of a module that FSDP2 shards."""
        return self.is_below_fsdp and not self.fsdp_ranks and not self.fsdp_replica_ranks


class PhasePeaks(msgspec.Struct, frozen=True):
    """Peaks of memory in one phase of a step, in bytes above those before the model was built."""

    step: int
    """Number of the step; -1 while the model is built."""
    phase: str
    requested_bytes: int
    """Bytes that torch asked for, before the allocator rounds."""
    waiting_bytes: int
    """Bytes of blocks that are freed and wait for a stream: peak of active memory above that of allocated memory."""
    start_bytes: int = 0
    """Most bytes that were held when the phase began; a step of several micro-batches has it several times."""


class HeldMemory(msgspec.Struct, frozen=True):
    """Memory that is held after a step, in bytes above that before the model was built."""

    step: int
    """Number of the step; -1 when the model is built."""
    requested_bytes: int
    """Bytes that torch asked for, before the allocator rounds."""
    known_bytes: dict[str, int]
    """Bytes on the device of the storages of `parameters`, `gradients`, `buffers`, of the `optimizer`'s state, and of
    all tensors that are `sharded`."""
    other_bytes: int
    """Bytes of all else."""


class AllocatorFacts(msgspec.Struct, frozen=True):
    """Memory of one rank: of an accelerator's caching allocator, or of the CPU, see `memory_log.MemoryLog`."""

    peaks: list[PhasePeaks]
    held: list[HeldMemory]


class AcceleratorFacts(msgspec.Struct, frozen=True):
    """Simulated accelerator of one rank, see `accelerator.AcceleratorLog`."""

    schedule: str
    busy_streams: list[int]
    """Streams of the run that worked in its steps, by their numbers in a schedule `starve:N`."""
    streams: StreamFacts
    """Streams in all steps."""


class StepCalls(msgspec.Struct, frozen=True):
    """Calls in forward, in one step, of the modules with which FSDP2 shards parameters, by parameter.

    Modules that compute by another method than forward are not seen.
    """

    first: dict[str, int]
    """Calls in the first micro-batch."""
    total: dict[str, int]
    """Calls in all micro-batches."""


class SubjectFacts(msgspec.Struct, frozen=True):
    """Measurements of one rank of a subject."""

    rank: int
    data_rank: int
    parameters: dict[str, ShardedParameter]
    """Layouts by the name in the model of one process."""
    fingerprints: dict[str, str]
    layouts: dict[str, str]
    losses: list[float]
    """Loss of each step as the trainer logs it; empty if its own loop tells none."""
    grad_norms: list[float]
    """Norm of each step's gradients before clipping; empty if neither the trainer's loop nor torch's clipping tells."""
    untied: list[str]
    """Names of parameters that are others in the model of one process, which ties them."""
    held: list[str]
    """Parameters that the optimizer holds, each as often as it holds it; `?` for a tensor that the model lacks."""
    uninitialised: dict[str, int]
    """Elements that look uninitialised when the model has been built, by parameter or buffer; those with 0 are left
    out."""
    matmul_dtypes: list[str]
    """Dtypes of the operands of matrix products in forward, outside of modules that FSDP2 was told to compute in
    fp32."""
    gradient_dtypes: list[str]
    collectives: list[Collective]
    """All collectives in the order in which this rank issued them; groups are named by their ranks, or `world`."""
    first_backward: list[int]
    """Number of collectives so far when the first backward pass of each step began."""
    calls: list[StepCalls]
    """Calls of the modules with which FSDP2 shards each parameter, by step."""
    unsharded: list[str]
    """Parameters with another layout than when they were built, as the optimizer is about to step: `step0: NAME`."""
    unsharded_for_others: list[str] = []
    """Parameters that are not sharded when another turn's optimizer steps, as `unsharded`: their weights are those of
    now, and their own turn may compute with them."""
    written: dict[str, Line] = {}
    """Line of the trainer that last wrote each parameter and buffer when the model was built; only of a tapped run."""
    sharding: list[Line] = []
    """Lines that called `fully_shard`; only of a tapped run."""
    accelerator: AcceleratorFacts | None = None
    """Streams of the simulated accelerator, if there is one."""
    memory: AllocatorFacts | None = None
    """Memory of the device on which the rank computes; None in records of earlier versions."""
    groups: list[GroupSettings] = []
    """Groups of parameters that FSDP2 has made, as they were when the first backward pass began."""
    fed_with_data: list[str] = []
    """Modules that FSDP2 has sharded and whose inputs need no gradient: FSDP reshards them when backward has ended."""
    saved_bytes: list[int] = []
    """Most bytes that autograd has saved when a backward pass begins, beside parameters and buffers, by step; only with
    tensor parallelism."""
    needless: list[UseOfCollective] = []
    """Collectives in forward and backward that the rank could have done without; only with tensor parallelism."""
    is_compiled: bool = False
    """True if `torch.compile` has compiled a module, whose graphs read tensors unseen."""
    batch_bytes: int = 0
    """Bytes of the micro-batches of the step that has most."""
    dataset_bytes: int = 0
    """Bytes of the tensors of a trainer's own dataset, whose loader yields the suite's micro-batches."""
    by_suite: list[Ingredient] = []
    """Ingredients of the steps that the suite has supplied."""
    scale_in_clipping: float = 1.0
    """Factor by which a `GradScaler` of the trainer's loop had scaled the gradients that were clipped."""
    kept_matmul_dtypes: list[str] = []
    """Dtypes of the operands of matrix products in forward, of groups that FSDP2 was told to keep in their dtype."""
    out_of_turn: list[str] = []
    """Sentences about optimizers that have stepped, or gradients that were clipped, in the turn of others."""
    by_products: list[str] = []
    """Parameters that have a gradient in the first step, for which the optimizer of another turn steps."""
    learning_rates: list[list[float]] = []
    """Learning rates with which the optimizer takes each step, by group of its parameters."""
    is_own_model: bool = False
    """True if the trainer's loop makes its model itself, with a seed that the suite does not know."""

    @property
    def is_own_loop(self) -> bool:
        """True if the trainer's own code takes the steps, False if the suite's loop does."""
        return "loop" not in self.by_suite


class ActivationMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that one process needs for a micro-batch beside parameters, gradients and the micro-batch, in bytes."""

    forward_bytes: int
    """Peak in forward."""
    held_bytes: int
    """Bytes that are held when backward begins."""
    output_bytes: int
    """Bytes of the model's outputs and of the loss."""
    backward_bytes: int
    """Peak in backward, with each gradient dropped as soon as it is complete."""
    saved_bytes: int
    """Bytes of `held_bytes` that autograd has saved for backward."""
    others_in_forward_bytes: int
    """Peak in forward of bytes that autograd has not saved yet, or never saves."""
    others_in_backward_bytes: int
    """Peak in backward of bytes that are no saved activations."""


class OwnErrors(msgspec.Struct, frozen=True):
    """Deviations of one process from a more accurate process, each the largest of several orders of sums."""

    by_name: dict[str, float]
    """Relative Frobenius deviation by parameter."""
    overall: float
    """Deviation of all tensors together, relative to all."""


class ReferenceFacts(msgspec.Struct, frozen=True):
    """Measurements of the model in one process."""

    dtype: str
    """Dtype of the more accurate process."""
    why_not_fp64: str
    """Error that the model raises in fp64, if it does."""
    parameters: list[str]
    aliases: dict[str, str]
    """Name in `parameters` of a tied parameter, by its other names."""
    sentinels: dict[str, int]
    """Elements that look uninitialised in one process, by buffer: NaN or the largest integer are meant there."""
    sentinels_at_most: dict[str, int]
    """Most elements that may look uninitialised with other weights, by buffer: all but one of a buffer with some."""
    unsaved_buffers: list[str]
    """Buffers that are not in the state dict: no state of the model, but memory for intermediate results."""
    untrained: list[str]
    """Parameters that get no gradient in one process, or do not require one."""
    max_norm: float
    losses: list[float]
    grad_norms: list[float]
    loss_error: float
    norm_error: float
    gradients: list[OwnErrors]
    """Own errors of fp32 by step."""
    updates: list[OwnErrors]
    """Own errors of the change since the start, by step."""
    bf16_gradients: OwnErrors | None
    """Own errors of bf16 in the first step; None if no cell with the same workload computes in bf16."""
    bf16_matmul_dtypes: list[str]
    activations: list[ActivationMemory]
    """Memory in fp32 by data-parallel rank, of each the most that a micro-batch of the run needs."""
    varies: bool
    """True if `count` differs between ranks."""
    optimizer_bytes: int = 0
    """Most bytes that the optimizer needs in a step on full tensors, besides its state."""
    autocast_activations: list[ActivationMemory] = []
    """Memory of a micro-batch under torch's autocast to bf16, by data-parallel rank; empty if nothing is in bf16."""
    bf16_activations: list[ActivationMemory] = []
    """Memory in bf16 by data-parallel rank, cast as FSDP2 casts; empty where nothing computes in bf16."""
    bf16_updates: list[OwnErrors] = []
    """Own errors of bf16 of the change since the start, by step; empty where nothing computes in bf16."""
    bf16_loss_error: float = 0.0
    """Largest relative deviation of a step's loss in bf16."""
    kept_in_fp32: list[str] = []
    """Parameters that the model's code needs in fp32 where others are in bf16, see `reference.kept_in_fp32`."""
    frozen: list[str] = []
    """Parameters that require no gradient in one process."""
    learning_rates: list[list[float]] = []
    """Learning rates with which the optimizer takes each step, by group of its parameters."""
    turns: int = 1
    """Steps of the run that are one training step, see `conformance.subjects.turns`."""
    by_products: list[list[str]] = []
    """Parameters that get a gradient in a step in which another turn's optimizer steps, by step."""
    notes: list[str] = []
    """Sentences about a loss that is unusual and can be judged, see `probes.require_sum`."""

    def meant(self, buffer: str, *, init: str) -> int:
        """Return the elements of a buffer that may look uninitialised, of a model made with these weights or others."""
        return (self.sentinels if init == "full" else self.sentinels_at_most).get(buffer, 0)


class ReferenceJob(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the task that trains a subject's model in one process."""

    subject: str
    workload: Workload
    in_bf16: bool
    """True if a cell that is compared with the reference may compute in bf16."""
    directory: str


class StepsJob(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the task that computes each step of a run in one process, from the tensors of the ranks before it."""

    subject: str
    cell: SubjectCell
    weights: str
    """File with the full weights with which each step began, by `stepN/NAME`; for the optimizer's steps also the full
    tensors of the run by the keys of ranks."""
    record: str
    """Directory with the tensors that the ranks kept."""
    directory: str


class TrainJob(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the task that trains a subject on the ranks of a cell."""

    subject: str
    cell: SubjectCell
    max_norm: float
    names: list[str]
    """Names of the parameters in the model of one process."""
    aliases: dict[str, str]
    """Name in `names` of a tied parameter, by its other names."""
    weights: str
    """File with the initial weights of the reference."""
    kept_in_fp32: list[str]
    """Parameters that the model's code needs in fp32, see `ReferenceFacts`."""
    directory: str
    defect: str | None = None
    schedule: str = ""
    """Schedule of the simulated accelerator; empty for the session's."""
    is_repeated: bool = False
    """True for a run all of whose steps are the first one: the same micro-batches, and updates of size 0."""
    seed: int = 0
    """Number that is added to the seed of torch's generators when the steps begin: a run MUST NOT depend on it."""


class Description(msgspec.Struct, frozen=True):
    """Packages of a subject, as its author names them."""

    versions: dict[str, str]
    """Version by package."""
    shims: list[str]
    """Private names that were touched to make the subject run here."""
    needs_fresh_processes: bool = False
    """True if no process may serve two runs of the subject."""
    accumulation: Accumulation = "any"
    turns: int = 1
    """Steps of a run that are one training step, see `conformance.subjects.turns`."""
    refused: dict[str, str] = {}
    """Reasons of the subject to refuse cells, by the cell's id."""
    loads_alike: bool = False
    """True if ranks can be forks of a process that has loaded the subject, see `conformance.subjects.loading`."""


class DescribeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Payload of the task that describes a subject."""

    subject: str
    devices: dict[str, DeviceType]
    """Types of the devices on which cells would run, by the cell's id."""
