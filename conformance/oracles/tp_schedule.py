"""Schedule of tensor parallelism: Megatron's plan (arXiv:1909.08053), with or without sequence parallelism.

Source of sequence parallelism: arXiv:2205.05198, figures 5 and 6.

Between two tensor-parallel regions activations of (batch, sequence, dim) are either replicated or sharded along the
sequence. A region is entered and left:

                                entering                      leaving
                                forward       backward        forward          backward
    replicated (f, g)           -             all-reduce      all-reduce       -
    sharded (g, g bar)          all-gather    reduce-scatter  reduce-scatter   all-gather

The embedding, sharded by rows of the vocabulary, only leaves a region, the output only enters a region; attention and
feed-forward do both.
"""

from collections.abc import Sequence
from itertools import product
from math import prod

import torch

from conformance.oracles import pipeline
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.frozen import is_trained, trained
from conformance.oracles.outline import outline
from conformance.oracles.schedule import (
    Event,
    Kind,
    Shapes,
    chunk_size,
    communicates,
    gradient_sync,
    group_of,
    passes_of,
    reduces_earlier,
)
from conformance.oracles.skipped import computed_blocks, is_computed
from conformance.oracles.torch_versions import traits_of
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.parallel_dims import ParallelDims

_ROWS = ("tok_embeddings", "output", "wq", "wk", "wv", "w1", "w3")
_COLUMNS = ("wo", "w2")
_EXPERTS = {"w1": 1, "w3": 1, "w13": 1, "w2": 2}
"""Sharded dimension of stacked experts, the hidden one; `w13` is w1 and w3 in one stack."""


def sharded_dim(parameter: str) -> int | None:
    """Return the dimension of a parameter that tensor parallelism shards, None if it is replicated.

    Raises ValueError for an unknown parameter.
    """
    if ".experts." in parameter:
        return _EXPERTS[parameter.partition(".experts.")[2].removesuffix(".weight")]
    module, kind = parameter.split(".")[-2:]
    if module in _ROWS:
        return 0
    if module in _COLUMNS:
        return 1 if kind == "weight" else None
    if is_norm(parameter) or is_router(parameter):
        return None
    raise ValueError(f"parameter {parameter}: not in the tensor-parallel plan of {__name__}; add its module there")


def is_norm(parameter: str) -> bool:
    """Return whether a parameter belongs to a norm; tensor parallelism replicates it."""
    return parameter.split(".")[-2].endswith("norm")


def is_router(parameter: str) -> bool:
    """Return whether a parameter belongs to a router, whose gradient is a sum over tensor-parallel ranks.

    Each of them has a copy of it, and a part of each expert that it chooses.
    """
    return parameter.split(".")[-2] == "router"


def local_shapes(model: ModelConfig, *, tp: int, tp_rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of a rank's tensor-parallel shard of each parameter.

    Where `tp` does not divide a dimension, the last ranks have less of it.
    """
    full = {name: tuple(parameter.shape) for name, parameter in outline(model).named_parameters()}
    return shards(full, tp=tp, tp_rank=tp_rank)


def shards(shapes: Shapes, *, tp: int, tp_rank: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of a rank's tensor-parallel shard of each parameter of these full shapes."""
    if tp == 1:
        return {name: tuple(shape) for name, shape in shapes.items()}
    local = {}
    for name, full in shapes.items():
        shape, dim = list(full), sharded_dim(name)
        if dim is not None:
            shape[dim] = chunk_size(shape[dim], tp, tp_rank)
        local[name] = tuple(shape)
    return local


def tensor_parallel_events(
    config: TrainerConfig, dims: ParallelDims, *, pp_rank: int = 0, shapes: Shapes | None = None
) -> list[Event]:
    """Return all collectives over `tp` in forward and backward of one optimizer step, in the order of every rank.

    In a pipeline they are those of the stages of `pp_rank`, micro-batch by micro-batch, which is not their order.
    `shapes` are those of a model whose blocks have other norms than the trainer's, or routers in some of them.
    Sizes are those of the largest rank: a rank that has less of an uneven dimension pads it before it is sent.
    """
    if dims.tp == 1:
        return []
    traffic = _Traffic(config, dims, shapes or local_shapes(config.model, tp=1, tp_rank=0))
    stages = pipeline.owners(config)
    for micro_batch, stage in product(range(config.accumulation), pipeline.stages_of(pp_rank, config)):
        layers = pipeline.layers_of(stage, config)
        traffic.run(micro_batch, layers=layers, first=stage == 0, last=stage == len(stages) - 1)
    return traffic.events


class _Traffic:
    def __init__(self, config: TrainerConfig, dims: ParallelDims, shapes: Shapes) -> None:
        self.events: list[Event] = []
        self._config, self._tp = config, dims.tp
        self._copied = {
            name: prod(shape)
            for name, shape in shapes.items()
            if is_router(name) or (is_norm(name) and config.sequence_parallel)
        }
        """Elements of parameters whose gradients are sums over the ranks."""
        self._trained = {group_of(name, config) for name in trained(shapes, config)}
        """Groups of FSDP with parameters that train."""
        self._policy = dtype_policy(config.precision)
        self._tokens = config.data.global_batch_size * config.data.seq_len // (dims.dp * config.accumulation)
        self._activation = self._tokens * config.model.dim

    def run(self, micro_batch: int, *, layers: Sequence[int], first: bool, last: bool) -> None:
        """Walk through the layers of a model or stage; `first` has the embedding, `last` norm, output and loss."""
        if micro_batch and self._config.evaluation != "none":
            self._forward("evaluate", layers=len(layers), first=first, last=last)
        self._forward("forward", layers=len(self._computed(layers, micro_batch)), first=first, last=last)
        if (micro_batch + 1) % self._config.passes:
            return
        for each in reversed(range(micro_batch + 1 - self._config.passes, micro_batch + 1)):
            self._backward(each, micro_batch, self._computed(layers, each), first=first, last=last)
        for layer in layers:
            if not passes_of(f"layers.{layer}", self._config, micro_batch):
                self._replicated_gradients(f"layers.{layer}.", micro_batch, micro_batch)

    def _computed(self, layers: Sequence[int], micro_batch: int) -> list[int]:
        computed = computed_blocks(self._config, micro_batch)
        return [layer for layer in layers if layer in computed]

    def _backward(self, micro_batch: int, ends: int, layers: Sequence[int], *, first: bool, last: bool) -> None:
        """Walk back through the forward pass of one of the micro-batches of the backward that `ends` with another."""
        if last:
            self._enter_backward()
            self._replicated_gradients("norm.", micro_batch, ends)
        for layer in reversed(layers):
            self._block_backward(layer, micro_batch, ends)
        if first and is_trained("tok_embeddings.weight", self._config):
            self._leave_backward()

    def _forward(self, phase: str, *, layers: int, first: bool, last: bool) -> None:
        if first:
            self._leave(phase)
        for _ in range(layers):
            self._block_forward(phase)
        if last:
            self._enter(phase)
            self._logits_and_loss(phase)

    def _block_forward(self, phase: str, *, regions_left: int = 2) -> None:
        """Attention and feed-forward."""
        for region in range(2):
            self._enter(phase)
            if region < regions_left:
                self._leave(phase)

    def _block_backward(self, layer: int, micro_batch: int, ends: int) -> None:
        """Feed-forward and attention, with recomputation, and gradients of norms when backward leaves their group.

        Selective checkpointing keeps the outputs of matrix products, but not those of collectives on them. An eager
        block is recomputed when backward asks for a tensor of it, up to the last tensor that backward needs: the sum
        that leaves the last region is not needed. Dropout draws the mask that backward asks for first when it is given
        that sum: the block is then recomputed first, and completely. So is a compiled block.
        """
        checkpointing = self._config.activation_checkpointing != "none"
        completely = self._config.compile != "none" or self._config.model.dropout > 0.0
        if checkpointing and completely:
            self._block_forward("backward")
        self._leave_backward()
        if checkpointing and not completely:
            self._block_forward("backward", regions_left=1)
        block, norm = f"layers.{layer}", f"layers.{layer}.ffn_norm"
        is_group = group_of(f"{norm}.weight", self._config) == norm
        self._enter_backward()
        if is_group:
            self._replicated_gradients(f"{norm}.", micro_batch, ends)
        self._leave_backward()
        self._enter_backward()
        for within in (".attention_norm.", ".feed_forward.") if is_group else (".",):
            self._replicated_gradients(f"{block}{within}", micro_batch, ends)

    def _enter(self, phase: str) -> None:
        if self._config.sequence_parallel:
            self._issue(phase, "all_gather", self._activation // self._tp)

    def _leave(self, phase: str) -> None:
        self._issue(phase, "reduce_scatter" if self._config.sequence_parallel else "all_reduce", self._activation)

    def _enter_backward(self) -> None:
        self._leave("backward")

    def _leave_backward(self) -> None:
        self._enter("backward")

    def _logits_and_loss(self, phase: str) -> None:
        """Logits are gathered, or three numbers of each token are reduced, in the loss's fp32.

        These are the maximum, the sum of exponentials and the label's logit. Backward needs nothing more: each rank
        knows the gradient of its own logits.
        """
        if self._config.loss_parallel:
            for _ in range(3):
                self._issue(phase, "all_reduce", self._tokens, "float32")
        else:
            self._issue(phase, "all_gather", self._tokens * -(-self._config.model.vocab_size // self._tp))

    def _replicated_gradients(self, prefix: str, micro_batch: int, ends: int) -> None:
        """Issue the reductions over `tp` of gradients that are partial sums.

        They are those of routers, and of norms whose activations sequence parallelism shards.
        Parameters are those whose names begin with `prefix`; gradients those of the backward that `ends` with a
        micro-batch, which are complete in the first of several passes, and those that wait for it.

        Each rank has the sum over its tokens. FSDP reduces it over `tp` when it takes the gradient to reduce it itself
        (FSDPParam._get_grad_inner_tensor), in the gradient's dtype: that of computation, or the dtype in which
        micro-batches have been accumulated, which from 2.15 on is that of all gradients of norms
        (`VersionTraits.gradients_have_own_dtypes`). Biases of wo and w2, unlike Megatron's, cost nothing: DTensor adds
        a share of them on each rank before the reduction, so that their gradient comes from what backward has gathered
        and is complete on every rank.
        """
        reduces, _ = communicates(self._config, ends)
        for name, numel in self._copied.items():
            if name.startswith(prefix) and reduces and is_trained(name, self._config):
                self._reduce_replicated(numel, group_of(name, self._config), micro_batch, ends)

    def _reduce_replicated(self, numel: int, group: str, micro_batch: int, ends: int) -> None:
        config, together = self._config, passes_of(group, self._config, ends)
        waits = gradient_sync(config) == "last" and is_computed(group, config, range(ends + 1 - config.passes))
        earlier = waits and reduces_earlier(group, config, self._trained)
        is_complete = micro_batch == together[0] if together else waits
        if not is_complete and not earlier:
            return
        accumulated = waits and not (earlier and is_complete)
        wide = accumulated or traits_of(str(torch.__version__)).gradients_have_own_dtypes
        self._issue("backward", "all_reduce", numel, self._policy.reduce if wide else self._policy.compute)

    def _issue(self, phase: str, kind: Kind, numel: int, dtype: str | None = None) -> None:
        self.events.append(Event(phase, kind, "tp", numel, dtype or self._policy.compute))
