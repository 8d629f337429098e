"""Configuration of the trainer: immutable, strictly typed, closed against unknown keys.

Fields of a `Struct` are checked when a file is converted (`load_config`). Relations between fields are checked in
`__post_init__`; those that depend on the number of processes, in `parallel_dims`.
"""

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Literal

from reference_trainer.checks import (
    Config,
    UsageError,
    at_least_one,
    fraction,
    not_negative,
    positive,
    require,
    require_each,
)
from reference_trainer.goes_with import (
    COMPILED_MODEL_GOES_WITH,
    CONTEXT_GOES_WITH,
    FLOAT8_GOES_WITH,
    FSDP1_GOES_WITH,
    TENSORWISE_GOES_WITH,
)
from reference_trainer.precision import PRECISIONS, PrecisionName
from reference_trainer.strict_yaml import allowed, convert, load, override

ScheduleName = Literal["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zero-bubble", "zbv-zero-bubble"]


class ModelConfig(Config, frozen=True, kw_only=True):
    """Llama-style decoder (RMSNorm, grouped-query attention with RoPE, SwiGLU)."""

    vocab_size: int = 256
    """Number of different tokens; need not be divisible by anything."""
    dim: int = 128
    """Width of the residual stream."""
    n_layers: int = 2
    n_heads: int = 4
    n_kv_heads: int = 2
    """Key/value heads, each shared by `n_heads / n_kv_heads` query heads."""
    ffn_dim: int = 256
    """Width of the SwiGLU hidden layer, and of that of each expert."""
    n_experts: int = 0
    """Experts of each block, of which a router chooses some for each token; one more sees all tokens. 0: none, the
    feed-forward network is dense."""
    experts_per_token: int = 2
    """Experts that are chosen for each token."""
    balance_weight: float = 0.01
    """Weight of the loss that lets a router choose all experts equally often for the tokens of a micro-batch."""
    max_seq_len: int = 256
    """Length of the RoPE table."""
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    bias: bool = False
    """Biases in the linear layers of the blocks; routed experts and routers have none."""
    tied_embeddings: bool = False
    """The output layer uses the embedding's weight."""
    dropout: float = 0.0
    """Probability with which the output of each attention and feed-forward layer is dropped."""
    init_std: float = 0.02
    """Standard deviation of embeddings and linear weights."""
    bias_std: float = 0.0
    """Standard deviation of linear biases; 0 sets them to zero."""
    norm_std: float = 0.0
    """Standard deviation of norm weights around 1."""
    arithmetic: Literal["float", "integer"] = "float"
    """`integer`: a stand-in with the same parameters that computes small integers, see `integer_model`; it learns
    nothing, but is exact in fp32 on every mesh. Initial weights are then -1, 0 or 1, independent of the three fields
    above."""

    def __post_init__(self) -> None:
        sizes = "vocab_size dim n_layers n_heads n_kv_heads ffn_dim max_seq_len"
        require_each(self, "model.", sizes, at_least_one, "at least 1")
        require_each(self, "model.", "rope_theta norm_eps", positive, "positive and finite")
        require_each(self, "model.", "init_std bias_std norm_std", not_negative, "finite and not negative")
        require_each(self, "model.", "dropout", fraction, "at least 0 and below 1")
        require_each(self, "model.", "n_experts balance_weight", not_negative, "finite and not negative")
        require(
            not self.n_experts or 1 <= self.experts_per_token <= self.n_experts,
            f"model.experts_per_token is {self.experts_per_token}, must be from 1 to n_experts {self.n_experts}",
        )
        require(self.dim % self.n_heads == 0, f"model.dim {self.dim} is not divisible by n_heads {self.n_heads}")
        require(self.head_dim % 2 == 0, f"head dimension {self.head_dim} (dim / n_heads) must be even for RoPE")
        require(
            self.n_heads % self.n_kv_heads == 0,
            f"model.n_heads {self.n_heads} is not divisible by n_kv_heads {self.n_kv_heads}",
        )

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.dim // self.n_heads


class MeshConfig(Config, frozen=True, kw_only=True):
    """Degrees of parallelism; their product is the number of processes."""

    pp: int = 1
    """Ranks over which layers are cut into the stages of a pipeline."""
    dp_replicate: int = 1
    """Replicas that hold the same shards (HSDP)."""
    dp_shard: int | Literal["auto"] = "auto"
    """Ranks over which parameters are sharded; `auto`: the number of processes / (pp x dp_replicate x tp)."""
    tp: int = 1
    """Tensor-parallel ranks."""
    ep: int = 1
    """Consecutive ranks of dp_shard over which experts are divided; each of them shards its experts over the dp_shard /
    ep ranks that have the same ones."""
    cp: int = 1
    """Consecutive ranks of dp_shard that share samples, each with a part of every sequence; attention of whole
    sequences goes around them as a ring."""

    def __post_init__(self) -> None:
        for name in ("pp", "dp_replicate", "dp_shard", "tp", "ep", "cp"):
            degree = getattr(self, name)
            require(degree == "auto" or degree >= 1, f"mesh.{name} is {degree}, must be at least 1")


class PipelineConfig(Config, frozen=True, kw_only=True):
    """Stages of a pipeline, and the schedule by which the micro-batches of a step pass through them."""

    schedule: ScheduleName = "1f1b"
    """Schedule of torch.distributed.pipelining. With `gpipe` and `1f1b` each rank has one stage, with the others
    several. `zbv-zero-bubble` gives a rank one stage on the way down and one on the way up, all others go round."""
    stages_per_rank: int | None = None
    """Stages of each rank. None: 1 with `gpipe` and `1f1b`, otherwise 2."""
    cuts: tuple[int, ...] | None = None
    """Layer with which each stage but the first begins. None: stages have equally many layers, or one more."""

    def __post_init__(self) -> None:
        cuts = self.cuts or ()
        require(all(a < b for a, b in pairwise((0, *cuts))), f"pipeline.cuts {list(cuts)} must rise, from 1 on")
        stages = self.stages_per_rank or 1
        require(stages >= 1, f"pipeline.stages_per_rank is {stages}, must be at least 1")


class DataConfig(Config, frozen=True, kw_only=True):
    """Samples: windows of a token file, chosen by seed, step and index alone."""

    path: str | None = None
    """Token file: `.npy` (one-dimensional integers), or any other file read as bytes. None: the corpus shipped here."""
    seq_len: int = 128
    """Tokens per sample."""
    global_batch_size: int = 8
    """Samples per optimizer step, over all ranks and micro-batches."""
    min_valid_fraction: float = 1.0
    """Below 1: each sample keeps a random fraction of its labels, at least this one; the others are ignored padding."""

    def __post_init__(self) -> None:
        require_each(self, "data.", "seq_len global_batch_size", at_least_one, "at least 1")
        require(
            0.0 < self.min_valid_fraction <= 1.0,
            f"data.min_valid_fraction is {self.min_valid_fraction}, must be above 0 and at most 1",
        )


class OptimizerConfig(Config, frozen=True, kw_only=True):
    """Optimizer, clipping and learning-rate schedule."""

    name: Literal["adamw", "sgd"] = "adamw"
    implementation: Literal["auto", "for-loop", "foreach", "fused"] = "auto"
    """`for-loop`: one parameter after the other. `foreach`: each operation on all parameters at once. `fused`: all
    operations in one kernel. `auto`: torch's choice, foreach on a CUDA device and for-loop on the CPU."""
    lr: float = 0.003
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Decay of parameters with two or more dimensions; norms and biases are never decayed."""
    momentum: float = 0.0
    """Fraction of the previous step's direction that a step keeps; SGD only."""
    max_norm: float = 1.0
    """Total norm to which gradients are scaled down; 0 turns clipping off."""
    norm_type: float | Literal["inf"] = 2.0
    """Order p of the p-norm that is clipped; "inf" (in quotes) is that of the largest absolute value."""
    error_if_nonfinite: bool = False
    """True: every process raises an error if any has a gradient that is not finite. False: only the norm tells."""
    foreach_clip: bool = True
    """True: clipping works on many tensors at once. False: on one after the other."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly to `lr`."""
    final_lr_fraction: float = 1.0
    """Fraction of `lr` to which the rate falls on a cosine after warm-up; 1 keeps it constant."""
    lr_decay_steps: int | None = None
    """Steps after which the rate has fallen and stays where it is. None: all `steps`; to extend such a run beyond them,
    set this field to their number."""

    def __post_init__(self) -> None:
        require_each(self, "optimizer.", "lr", positive, "positive and finite")
        require_each(self, "optimizer.", "beta1 beta2 momentum", fraction, "at least 0 and below 1")
        require(
            self.name == "sgd" or not self.momentum,
            f"optimizer.momentum {self.momentum} has no effect with {self.name}, which has beta1: use name sgd",
        )
        names = "eps weight_decay max_norm warmup_steps"
        require_each(self, "optimizer.", names, not_negative, "finite and not negative")
        require(
            self.norm_type == "inf" or positive(self.norm_type),
            f'optimizer.norm_type is {self.norm_type}, must be positive and finite, or "inf"',
        )
        require(
            0.0 <= self.final_lr_fraction <= 1.0,
            f"optimizer.final_lr_fraction is {self.final_lr_fraction}, must be at least 0 and at most 1",
        )
        require(
            self.lr_decay_steps is None or (self.lr_decay_steps >= 1 and self.final_lr_fraction < 1.0),
            f"optimizer.lr_decay_steps is {self.lr_decay_steps}: at least 1, and only with final_lr_fraction below 1",
        )

    @property
    def norm_order(self) -> float:
        """`norm_type` as a number."""
        return float(self.norm_type)

    @property
    def moments(self) -> int:
        """Number of tensors of a parameter's size that the optimizer keeps for each parameter."""
        return 2 if self.name == "adamw" else int(self.momentum > 0)


class LossScaleConfig(Config, frozen=True, kw_only=True):
    """Factor by which a precision of fp16 multiplies losses and divides gradients.

    The factor is halved when a gradient overflows, and doubled after some steps in which none did.
    """

    initial: float = 2.0**16
    """Factor in the first step: a power of two, so that scaling rounds nothing."""
    growth_interval: int = 2000
    """Steps in a row without overflow after which the factor is doubled."""

    def __post_init__(self) -> None:
        fits = positive(self.initial) and math.frexp(self.initial)[0] == 0.5
        require(fits, f"loss_scale.initial is {self.initial}, must be a power of two, such as 65536.0")
        require_each(self, "loss_scale.", "growth_interval", at_least_one, "at least 1")


class Frozen(Config, frozen=True, kw_only=True):
    """Parameters that do not train at first, or never."""

    names: str
    """Regular expression that matches the full names of parameters, such as `layers\\.0\\..*`."""
    until: int | None = None
    """Step from which they train. None: they never do."""


class Skipped(Config, frozen=True, kw_only=True):
    """Block that some forward passes leave out, the same ones on all ranks."""

    block: int
    """Index of the block."""
    passes: tuple[bool, ...]
    """True for each forward pass of training that leaves it out, from the first of the run on; repeats when it ends."""

    def __post_init__(self) -> None:
        require(bool(self.passes), f"skipped: no passes for block {self.block}: give at least one")


Init = Literal["meta", "full", "layerwise", "checkpoint"]
AfterForwardName = Literal["always", "never"]
Reshard = Literal["always", "never", "default", "except-last", "auto"] | int | dict[str, AfterForwardName | int]
GradientSync = Literal["each", "last", "all-reduce-last"]


class TrainerConfig(Config, frozen=True, kw_only=True):
    """Everything that determines a training run, except the number of processes."""

    model: ModelConfig = ModelConfig()
    mesh: MeshConfig = MeshConfig()
    pipeline: PipelineConfig = PipelineConfig()
    """Pipeline, with mesh.pp above 1 only."""
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionName = "fp32"
    """`fp32`: everything in fp32. The dtypes of the others are in `precision.PRECISIONS`.
    `bf16-mp`: fp32 parameters, computation in bf16, gradients reduced in fp32.
    `bf16-init`: as bf16-mp, but parameters are built, sharded and initialised in bf16, and then cast to fp32.
    `bf16-reduce`: as bf16-mp, but gradients are reduced in bf16.
    `bf16-params`: as bf16-mp, but torch chooses the dtype in which gradients are reduced: that of computation up to
    2.14, from 2.15 on that of the sharded parameters.
    `bf16-mixed`: as bf16-mp, but only the norms have fp32 parameters; all others, and with them their gradients and
    optimizer state, are bf16 throughout. Cannot be compiled.
    `fp16-mp`: as bf16-mp, but computation is in fp16, of a scaled loss. Steps whose gradients overflow are skipped.
    `fp16-reduce`: as fp16-mp, but gradients are reduced in fp16, too, and divided by one factor before the reduction
    and by another after it."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Scales of float8 products in the linear layers of blocks, which need torchao: one for a whole matrix, which is
    then also gathered in float8, or one for each row."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Loss scale, with a precision of fp16 only."""
    tf32: bool = False
    """Round the factors of matrix products to TF32, which has fp16's digits; precision fp32 on a CUDA device only."""
    reshard: Reshard = "default"
    """Groups of parameters that are freed after forward. `default`: all but the last group (norm and output), which
    backward needs at once; in a pipeline none, since each micro-batch would gather them again. `except-last`: all but
    the last group and the last block. A number: all groups stay sharded over so many ranks. A table of regular
    expressions over the names of groups (`tok_embeddings`, `layers.0`, ..., `output`): the first that matches the full
    name decides, between always, never and a number; a group that none matches is always resharded. `auto`: never if
    the estimated peak then fits, else default, in a pipeline always."""
    grouping: Literal["blocks-and-ends", "blocks"] = "blocks-and-ends"
    """FSDP groups: each block, the embedding, and norm and output together; or each block, and embedding, norm and
    output as one group around them, which a tied weight needs in any case."""
    memory_bytes: int | None = None
    """Memory of each process that `auto` may count on. None: that of the device."""
    init: Init = "meta"
    """Strategy of initialisation. `meta` builds and shards on the meta device, materialises each rank's shards
    (`to_empty`) and samples the initial weights. `checkpoint`: as meta, but loads the weights. `layerwise`
    materialises, initialises and shards one block after the other. `full` materialises and initialises the full model
    on every rank, then shards."""
    checkpoint: str | None = None
    """Path of the weights with init=checkpoint, one of: a safetensors file with the full tensor of each parameter under
    its name (a tied output layer has no entry); a Llama model of the transformers library, as a safetensors file or the
    directory of several; a directory of torch.distributed.checkpoint, such as a step that was saved by this trainer.
    Values are cast to the parameters' dtype."""
    checkpoint_reader: Literal["each-rank", "rank0"] = "each-rank"
    """`each-rank`: all ranks read, one tensor at a time. `rank0`: only rank 0 reads, holds the full model in memory and
    broadcasts it; the others read names and shapes alone."""
    offload: Literal["none", "cpu"] = "none"
    """`cpu`: sharded parameters, gradients and optimizer state are in host memory, where gradients are clipped and the
    optimizer steps. The process group needs a backend for CPU tensors."""
    pin_memory: bool = False
    """Page-lock host memory, so that copies overlap with computation; offload=cpu on an accelerator only."""
    sequence_parallel: bool = True
    """Shard activations between tensor-parallel regions along the sequence, with tp > 1."""
    norms_in_tp: bool = True
    """Replicate the parameters of norms over the tensor-parallel ranks, with tp > 1 and no sequence parallelism. False
    leaves norms out of tensor parallelism; their parameters are then on another mesh than all others."""
    loss_parallel: bool = False
    """Leave logits sharded over the vocabulary and compute the loss on the shards, with tp > 1."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """`full`: each block keeps only its input and recomputes its other activations in backward; `selective`: a block
    also keeps the outputs of matrix products and of attention."""
    compile: Literal["none", "inductor", "aot_eager"] = "none"
    """Backend of torch.compile."""
    compiled: Literal["blocks", "model"] = "blocks"
    """Modules that the backend compiles: each block in one graph, or the model, whose graph breaks at FSDP's hooks."""
    evaluation: Literal["none", "between-micro-batches"] = "none"
    """`between-micro-batches`: between two micro-batches of a step the model computes the loss of the first once more,
    without gradients and dropout."""
    accumulation: int = 1
    """Micro-batches per optimizer step; a pipeline needs at least as many as it has ranks."""
    passes: int = 1
    """Forward passes, of a micro-batch each, before a backward of the sum of their losses; divides `accumulation`."""
    forward_prefetch: int = 0
    """Number of groups that a group prefetches in forward, before it computes. 0, FSDP's default: none; communication
    overlaps only where the CPU runs ahead of the device."""
    backward_prefetch: int = 0
    """Number of groups that a group prefetches in backward, in an explicit list. 0, FSDP's default: the next group, in
    the reverse of the order in which forward left the groups, as with 1."""
    gradient_sync: GradientSync = "each"
    """Micro-batches after which gradients are reduced. `last`: only the last, until then every rank holds unsharded
    gradients. `all-reduce-last` (HSDP): reduce-scattered after each, all-reduced after the last. A pipeline always
    reduces after the last of its micro-batches: leave this field out."""
    frozen: tuple[Frozen, ...] = ()
    """Parameters that do not train: the first entry that matches a name decides."""
    skipped: tuple[Skipped, ...] = ()
    """Blocks that some forward passes leave out. A block that no pass of a step computes has no gradient, and the
    optimizer leaves it alone. With `gradient_sync: all-reduce-last` torch up to 2.14 adds the gradient of a block that
    the last micro-batch leaves out to that of the next step, see findings/partial_sums_of_unused_modules.py."""
    shard_placement: Literal["rows", "columns"] = "rows"
    """Dimension of matrices that FSDP shards. `columns`: dimension 1 of those whose columns the shards divide evenly,
    as torch demands; all other parameters are sharded by rows, as with `rows`."""
    gradient_divisor: float | None = None
    """Number by which FSDP divides the sums of gradients over data-parallel ranks. None: the number of these ranks. The
    loss is scaled so that gradients are those of the step's mean loss in any case."""
    implementation: Literal["fsdp2", "fsdp1"] = "fsdp2"
    """`fsdp1`: FullyShardedDataParallel, to compare FSDP2 with; supports few of the other options."""
    limit_all_gathers: bool = True
    """Let the host wait before it runs more than two all-gathers ahead of the device; FSDP1 only."""
    steps: int = 300
    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        # msgspec checks values of files, not those that Python gives.
        require(self.precision in PRECISIONS, f"precision is {self.precision}{allowed(self.precision, PRECISIONS)}")
        require_each(self, "", "accumulation passes steps", at_least_one, "at least 1")
        require_each(self, "", "forward_prefetch backward_prefetch", not_negative, "at least 0")
        require(0 <= self.seed < 2**64, f"seed is {self.seed}, must be at least 0 and below 2**64")
        _check_compatibility(self)


def has_group_around_blocks(config: TrainerConfig) -> bool:
    """Return whether embedding, norm and output are one FSDP group, which forward enters first and leaves last."""
    return config.grouping == "blocks" or config.model.tied_embeddings


def load_config(path: Path, overrides: Sequence[str] = ()) -> TrainerConfig:
    """Read a YAML file, apply `section.field=value` overrides and check the result.

    Raises ConfigError, a UsageError, with file and line or the override, and the allowed values.
    """
    return convert(override(load(path), overrides), TrainerConfig)


def _check_compatibility(config: TrainerConfig) -> None:
    """Raise UsageError, with the remedy, for options in conflict."""
    _check_reshard(config)
    require(not config.frozen or config.mesh.pp == 1, "frozen needs a mesh without a pipeline: leave it out")
    require(
        config.evaluation == "none" or (config.accumulation > 1 and config.mesh.pp == 1),
        f"evaluation {config.evaluation} needs accumulation of at least 2, and a mesh without a pipeline",
    )
    require(
        config.accumulation % config.passes == 0 and (config.passes == 1 or config.mesh.pp == 1),
        f"passes {config.passes} must divide accumulation, which is {config.accumulation}; pipelines have schedules of "
        "their own: use passes 1 with mesh.pp above 1",
    )
    require(
        config.gradient_divisor is None or positive(config.gradient_divisor),
        f"gradient_divisor is {config.gradient_divisor}, must be positive and finite",
    )
    require(
        config.offload == "cpu" or not config.pin_memory,
        "pin_memory has no effect with offload none: set offload=cpu, or pin_memory=false",
    )
    require(
        config.norms_in_tp or not config.sequence_parallel,
        "norms_in_tp false leaves norms out of tensor parallelism, but sequence_parallel shards their activations: "
        "set sequence_parallel=false, or norms_in_tp=true",
    )
    require(
        config.data.seq_len <= config.model.max_seq_len,
        f"data.seq_len {config.data.seq_len} is longer than model.max_seq_len {config.model.max_seq_len}",
    )
    require(
        config.activation_checkpointing != "selective" or config.compile != "inductor",
        "activation_checkpointing selective with compile inductor: the matrix products of inductor write into its "
        "own buffers and cannot be kept; use activation_checkpointing full, or another compile",
    )
    if config.compiled == "model":
        _require_values(config, COMPILED_MODEL_GOES_WITH, "compiled model", "use compiled blocks")
    require(
        config.model.arithmetic == "float" or not config.loss_parallel,
        "loss_parallel computes a cross entropy, which model.arithmetic integer does without: set it to false",
    )
    require(
        (config.init == "checkpoint") == (config.checkpoint is not None),
        f"init is {config.init} and checkpoint is {config.checkpoint}: a file is needed with init checkpoint, and only "
        "with it",
    )
    require(
        config.init == "checkpoint" or config.checkpoint_reader == "each-rank",
        f"checkpoint_reader {config.checkpoint_reader} has no effect with init {config.init}: set init=checkpoint",
    )
    _check_skipped(config)
    _check_experts(config)
    if config.mesh.cp > 1:
        _require_values(config, CONTEXT_GOES_WITH, f"mesh.cp {config.mesh.cp}", "use mesh.cp=1")
    if config.float8 != "none":
        _require_values(config, FLOAT8_GOES_WITH, f"float8 {config.float8}", "use float8 none")
    if config.float8 == "tensorwise":
        _require_values(config, TENSORWISE_GOES_WITH, "float8 tensorwise", "use float8 rowwise")
        ranks = [each for each in (config.reshard, *_table(config).values()) if isinstance(each, int)]
        require(not ranks, f"float8 tensorwise with reshard to {ranks} ranks, which FSDP cannot gather from: use names")
    _check_norms_apart(config)
    _check_numerics(config)
    _check_implementation(config)


def _check_skipped(config: TrainerConfig) -> None:
    blocks = [each.block for each in config.skipped]
    wrong = [block for block in blocks if not 0 <= block < config.model.n_layers or blocks.count(block) > 1]
    require(not wrong, f"skipped: blocks {wrong} are named twice, or not among {config.model.n_layers} layers")
    require(
        not blocks or (config.mesh.pp == 1 and not config.model.n_experts),
        "skipped with a pipeline or experts: stages exchange activations of all blocks, and experts of a block are "
        "balanced over all tokens of a pass; use mesh.pp=1 and model.n_experts=0",
    )


def _check_experts(config: TrainerConfig) -> None:
    experts, ranks = config.model.n_experts, config.mesh.ep
    if not experts:
        require(ranks == 1, f"mesh.ep is {ranks}, but the model has no experts: set model.n_experts, or mesh.ep=1")
        return
    require(experts % ranks == 0, f"model.n_experts {experts} is not divisible by mesh.ep {ranks}")
    require(
        config.compile == "none",
        f"model.n_experts with compile {config.compile}: the number of tokens of each expert is known to the data "
        "alone, which breaks the graph of a block; use compile none",
    )
    require(
        config.model.arithmetic == "float",
        f"model.n_experts with model.arithmetic {config.model.arithmetic}: probabilities of experts are no whole "
        "numbers; use arithmetic float",
    )
    require(config.mesh.pp == 1, "model.n_experts: the trainer cuts no model with experts into stages; set mesh.pp=1")
    require(config.implementation == "fsdp2", "model.n_experts with fsdp1: use implementation fsdp2")
    recomputed = f"mesh.ep {ranks} with activation_checkpointing {config.activation_checkpointing}"
    require(
        ranks == 1 or config.activation_checkpointing != "selective",
        f"{recomputed}: hooks of the experts' FSDP groups would lie inside what is recomputed, which torch 2.13 "
        "refuses; use activation_checkpointing full",
    )
    require(
        ranks == 1 or config.activation_checkpointing == "none" or not config.forward_prefetch,
        f"{recomputed} and forward_prefetch {config.forward_prefetch}: what is recomputed in backward enters the "
        "experts' FSDP groups again, which would gather groups that nothing needs any more; use forward_prefetch 0",
    )


def _require_values(config: TrainerConfig, goes_with: dict[str, tuple[object, ...]], given: str, remedy: str) -> None:
    for name, values in goes_with.items():
        value = attrgetter(name)(config)
        allowed_values = " or ".join(map(str, values))
        require(value in values, f"{given} with {name} {value}: {remedy}, or {name} {allowed_values}")


def _check_norms_apart(config: TrainerConfig) -> None:
    if not PRECISIONS[config.precision].norms_apart:
        return
    checkpointing = f"precision {config.precision} with activation_checkpointing {config.activation_checkpointing}"
    require(
        config.activation_checkpointing != "selective",
        f"{checkpointing}: hooks of the norms' FSDP groups would lie inside what is recomputed, which torch 2.13 "
        "refuses; use activation_checkpointing full",
    )
    require(
        config.activation_checkpointing == "none" or not config.forward_prefetch,
        f"{checkpointing} and forward_prefetch {config.forward_prefetch}: what is recomputed in backward enters the "
        "norms' FSDP groups again, which would gather groups that nothing needs any more; use forward_prefetch 0, or "
        "another of the two",
    )
    require(
        config.compile == "none",
        f"precision {config.precision} with compile {config.compile}: norms are FSDP groups of their own inside the "
        "compiled blocks, whose hooks cannot be compiled; use compile none or another precision",
    )


def _check_numerics(config: TrainerConfig) -> None:
    precision = PRECISIONS[config.precision]
    require(
        precision.compute == "float32" or not config.tf32,
        f"tf32 has no effect with precision {config.precision}, whose products are not of fp32 numbers: set tf32=false",
    )
    require(
        precision.scales_loss or config.loss_scale == type(config.loss_scale)(),
        f"loss_scale has no effect with precision {config.precision}: set precision=fp16-mp, or leave it out",
    )
    require(
        not (precision.scales_loss and config.optimizer.error_if_nonfinite),
        f"optimizer.error_if_nonfinite with precision {config.precision}: gradients that overflow are how the loss "
        "scale is found, their step is skipped; set optimizer.error_if_nonfinite=false",
    )


def _check_reshard(config: TrainerConfig) -> None:
    table = _table(config)
    for expression in table:
        try:
            re.compile(expression)
        except re.error as error:
            raise UsageError(f"reshard: {expression!r} is not a regular expression: {error}") from None
    for ranks in (config.reshard, *table.values()):
        require(not isinstance(ranks, int) or ranks >= 2, f"reshard to {ranks} ranks: must be at least 2")
    require(
        config.memory_bytes is None or (config.reshard == "auto" and config.memory_bytes >= 1),
        f"memory_bytes is {config.memory_bytes}: at least 1, and only with reshard auto, which is {config.reshard}",
    )


def _table(config: TrainerConfig) -> dict[str, AfterForwardName | int]:
    return config.reshard if isinstance(config.reshard, dict) else {}


def _check_implementation(config: TrainerConfig) -> None:
    if config.implementation == "fsdp2":
        require(config.limit_all_gathers, "limit_all_gathers false has no effect with fsdp2: set implementation=fsdp1")
        return
    remedy = "it is for comparison alone; use implementation fsdp2"
    _require_values(config, FSDP1_GOES_WITH, "implementation fsdp1", remedy)
