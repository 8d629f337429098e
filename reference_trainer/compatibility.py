"""Compatibility of a trainer's options: errors, with the remedy, for options in conflict or without effect."""

import re
from operator import attrgetter
from typing import TYPE_CHECKING

from reference_trainer.checks import UsageError, require
from reference_trainer.precision import PRECISIONS

if TYPE_CHECKING:
    from reference_trainer.config import TrainerConfig


def check_compatibility(config: "TrainerConfig") -> None:
    """Raise UsageError, with the remedy, for options in conflict."""
    _check_reshard(config)
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
    _check_norms_apart(config)
    _check_numerics(config)
    _check_implementation(config)


def _check_norms_apart(config: "TrainerConfig") -> None:
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


def _check_numerics(config: "TrainerConfig") -> None:
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


def _check_reshard(config: "TrainerConfig") -> None:
    table = config.reshard if isinstance(config.reshard, dict) else {}
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


_FSDP1_GOES_WITH: dict[str, tuple[object, ...]] = {
    "init": ("full",),
    "precision": ("fp32", "bf16-mp"),
    "reshard": ("default", "never"),
    "offload": ("none",),
    "accumulation": (1,),
    "activation_checkpointing": ("none",),
    "compile": ("none",),
    "norms_in_tp": (True,),
    "mesh.dp_replicate": (1,),
    "model.tied_embeddings": (False,),
    "optimizer.implementation": ("auto",),
    "optimizer.norm_type": (2.0,),
    "optimizer.error_if_nonfinite": (False,),
    "optimizer.foreach_clip": (True,),
}
"""Values of options that the suite compares with FSDP1, which itself supports more."""


def _check_implementation(config: "TrainerConfig") -> None:
    if config.implementation == "fsdp2":
        require(config.limit_all_gathers, "limit_all_gathers false has no effect with fsdp2: set implementation=fsdp1")
        return
    for name, values in _FSDP1_GOES_WITH.items():
        value = attrgetter(name)(config)
        require(
            value in values,
            f"implementation fsdp1 with {name} {value}: it is for comparison alone; use implementation fsdp2, or "
            f"{name} {' or '.join(map(str, values))}",
        )
