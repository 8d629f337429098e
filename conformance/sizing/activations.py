"""Estimate of the activations of a step, on a rank of any mesh.

Each layer saves tensors for backward, with fused attention and norms, and its largest product needs a temporary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from conformance.memory_segment import MemorySegment
from conformance.oracles import pipeline
from conformance.oracles.dtype_policy import dtype_policy
from conformance.oracles.pipeline import Action
from conformance.oracles.schedule import Group, entered, groups, present, shardings, spans_model
from conformance.oracles.torch_versions import UP_TO_2_14, gradients_stay
from conformance.oracles.tp_schedule import shards
from conformance.sizing import ring_memory
from conformance.sizing.decoder import Decoder, Workload

_FP32_BYTES = 4
_NOT_SHARDED = ("wo", "w2", "router")
"""Products of which each tensor-parallel rank has outputs of full width: routers, and parts of sums over the ranks."""


def kept_for_backward(profile: Sequence[MemorySegment]) -> int:
    """Return the bytes of the activations before the first backward."""
    return next(segment.start_bytes for segment in profile if segment.mark == "backward")


@dataclass(frozen=True)
class _Costs:
    """Bytes of each group for one micro-batch."""

    saved: dict[str, int]
    """Activations that are kept for backward."""
    working: dict[str, int]
    """Results that are freed at once."""
    returned: dict[str, int]
    """Gradients of activations at their peak in a backward, less the activations that it has freed by then."""
    recomputed: dict[str, int]
    """Activations that backward computes again."""
    freed: dict[str, int]
    """Activations that the first half of a backward needs last."""
    arrived: dict[str, int]
    """Gradients that the first half of a backward keeps for the second."""
    gradients: dict[str, int]
    """Gradients of the group's parameters."""
    experts: dict[str, str]
    """Group of experts by block, where they are a group inside of the block's; its activations count as the block's."""
    gradient_of_embedding: int
    """Gradient of the embedding's weight."""
    gradients_of_logits: int
    """Gradients of the logarithms and of the logits, and temporaries of their computation."""
    transferred: int
    """Activations that a stage sends or receives."""


def _costs(workload: Workload) -> _Costs:
    decoder, config, dims = workload.decoder, workload.config, workload.dims
    compute = _compute_bytes(workload)
    tokens = config.data.global_batch_size * config.data.seq_len // (dims.dp * config.accumulation)
    gradients = _unpadded(workload)
    names = [name for name in entered(groups(config)) if name in gradients]

    def nbytes(elements: Width, *, ends: int = 0) -> dict[str, int]:
        """Return the bytes of so many elements of each token, by group; `ends` are those of embedding and output."""
        layers = {name: int(name.removeprefix("layers.")) for name in names if _is_block(name)}
        widths: dict[str, _Elements | _Largest] = dict.fromkeys(names, _Elements(ends))
        widths |= {name: elements(decoder, layer) for name, layer in layers.items()}
        return {name: width.on_rank(dims.tp, each_bytes=tokens * compute) for name, width in widths.items()}

    hidden = tokens * decoder.dim * compute // dims.tp
    is_sharded = config.loss_parallel and dims.tp > 1
    logits = tokens * decoder.vocab_size * _FP32_BYTES // (dims.tp if is_sharded else 1)
    logits *= workload.logits != "chunked"
    # The embedding's output counts with the first block. The last layer keeps its input as it was gathered over tp. The
    # loss keeps logarithms in fp32.
    computed = logits * compute // _FP32_BYTES
    held = {"kept": computed, "kept-fp32": logits}.get(workload.logits, 0)
    loss = held + logits
    inner = (name for name in names if name.startswith("layers.") and not _is_block(name))
    experts = {".".join(name.split(".")[:2]): name for name in inner}
    exchanged, returned = (nbytes(width) for width in (_exchanged, _returned_in_exchange))
    saved, every = nbytes(KEPT[workload.checkpointing]), nbytes(KEPT["none"])
    if dims.cp > 1:  # merged halves are laid out otherwise than the input of the next product, which is a copy
        copies = nbytes(_output_of_attention)
        every = {name: kept + copies[name] for name, kept in every.items()}
        saved = every if workload.checkpointing == "none" else saved
    recomputed = {name: every[name] - saved[name] for name in names}
    working = nbytes(_largest, ends=decoder.dim)
    raised = logits if compute < _FP32_BYTES and workload.logits != "kept-fp32" else 0  # to fp32, before the logarithm
    exponentials = logits * is_sharded  # which the sharded loss computes by itself, forward and backward
    working["output"] = max(working["output"], raised + max(0, computed - held) + exponentials)
    if workload.checkpointing != "full":
        scores = tokens * decoder.n_heads * _FP32_BYTES // dims.tp  # fused attention keeps a sum of each row
        saved = {name: kept + scores * _is_block(name) for name, kept in saved.items()}
    results = nbytes(_returned, ends=decoder.dim)
    for block in experts:
        working[block] = max(exchanged[block], exchanged[block] // 2 + working[block])
        results[block] = max(returned[block], results[block])
    if dims.cp > 1:
        attended = tokens * decoder.n_heads * decoder.head_width // dims.tp
        forward, backward = (
            attended * peak(dims.cp, itemsize_bytes=compute)
            for peak in (ring_memory.forward_peak_bytes, ring_memory.backward_peak_bytes)
        )
        attending, added = nbytes(_held_in_attention), nbytes(_added_in_attention_backward)
        for block in filter(_is_block, names):
            working[block] = max(working[block], attending[block] - saved[block] + forward)
            results[block] = max(results[block], added[block] + backward)
    return _Costs(
        saved=saved | {"output": (1 + dims.tp) * hidden + loss},
        working=working,
        returned=results | {"output": working["output"]},
        recomputed=recomputed,
        freed=dict.fromkeys(names, 0) | {"output": loss},
        arrived=nbytes(_gradients) | {"output": hidden + computed},
        gradients=gradients,
        experts=experts,
        gradient_of_embedding=decoder.vocab_size * decoder.dim * compute // dims.tp,
        gradients_of_logits=2 * logits + exponentials,
        transferred=pipeline.activation_numel(config, dims) * compute,
    )


def estimated_profile(workload: Workload) -> list[MemorySegment]:
    """Return activations and gradients as a run without FSDP would hold them, group by group, of all micro-batches."""
    config = workload.config
    costs = _costs(workload)
    walk, among = _Walk(costs, stay=False), _groups(workload)
    if spans_model(config):
        (outer,) = among
        walk.spanned(outer.name, [group.name for group in outer.inner], tied=config.model.tied_embeddings)
    else:
        names = [group.name for group in among]
        walk.forward(names)
        walk.backward(names)
    return walk.segments * config.accumulation


def estimated_stages_profile(workload: Workload, *, rank: int) -> list[MemorySegment]:
    """Return activations and gradients of the stages of a rank of the pipeline, as `estimated_profile` does."""
    config = workload.config
    costs, rank_of = _costs(workload), pipeline.owners(config)
    walk = _Walk(costs, stay=gradients_stay(config, UP_TO_2_14))
    for action, ends_stage in pipeline.with_ends(pipeline.order(config, rank=rank), config):
        names = pipeline.groups_of(action.stage, config)
        walk.enter(action.stage)
        match action.kind:
            case "forward":
                walk.forward(names)
            case "backward-input" if action.stage > 0:
                walk.backward_of_input(names, keeps=rank_of[action.stage - 1] != rank)
            case "backward-weight" if action.stage > 0:
                walk.backward_of_parameters(names)
            case "backward" | "backward-weight":
                walk.backward(names)
        if not pipeline.has_one_stage(config):
            walk.hold_sent(pipeline.sends(_held_by_sends_alone(action), config))
        if ends_stage:
            walk.reduce(names)
    return walk.segments


def _held_by_sends_alone(action: Action) -> list[Action]:
    """Return the actions whose results are kept alive by their sends from this action on, see `pipeline.sent_numel`.

    Up to then the stage itself holds its output, and the gradient of a halved backward throughout.
    """
    forward = action._replace(kind="forward")
    return {"backward": [forward, action], "backward-input": [forward]}.get(action.kind, [])


class _Walk:
    """Walk through the groups of a model or of stages; `stay` says whether gradients wait with their parameters."""

    def __init__(self, costs: _Costs, *, stay: bool) -> None:
        self.segments: list[MemorySegment] = []
        self._costs, self._stay = costs, stay
        self._held = 0
        self._waiting: set[str] = set()
        """Groups whose gradients wait for their reduction."""

    def _add(self, mark: str, *, more: int = 0, then: int = 0) -> None:
        """Add a segment that needs `more` bytes at its peak, and ends with `then` more than it began with."""
        self.segments.append(MemorySegment(mark, self._held, self._held + max(more, then), self._held + then))
        self._held += then

    def enter(self, stage: int) -> None:
        self._add(f"stage {stage}")

    def forward(self, names: Sequence[str]) -> None:
        self._add("forward")
        self._forward(names)

    def _forward(self, names: Sequence[str]) -> None:
        for name in names:
            saved = self._costs.saved[name]
            inside = self._costs.experts.get(name)
            if inside:
                self._add(f"forward {name}")
            self._add(f"forward {inside or name}", more=saved + self._costs.working[name], then=saved)
            if inside:
                self._add(f"after-forward {inside}")
            self._add(f"after-forward {name}")

    def backward(self, names: Sequence[str]) -> None:
        self._add("backward", more=self._costs.gradients_of_logits if "output" in names else 0)
        self._backward(names)
        self._add("end")

    def _backward(self, names: Sequence[str]) -> None:
        for name in reversed(names):
            gradients = self._costs.gradients[name]
            more = self._costs.recomputed[name] + gradients + self._costs.returned[name]
            stay = 0 if name in self._waiting else gradients
            mark = f"backward {name}"
            if name in self._costs.experts:
                self._add(mark)
                self._backward_of_experts(name)
                mark = "other parameters"
            self._add(mark, more=more, then=stay - self._costs.saved[name])
            self._add(f"gradients {name}", then=0 if self._stay else -gradients)
            self._waiting |= {name} if self._stay else set()
            self._add(f"freed {name}")

    def _backward_of_experts(self, block: str) -> None:
        """Compute the gradients of experts inside of the backward of their block, which recomputes before."""
        costs, experts = self._costs, self._costs.experts[block]
        gradients, recomputed = costs.gradients[experts], costs.recomputed[block]
        if recomputed:
            self._add(f"forward {experts}", more=recomputed)
            self._add(f"after-forward {experts}")
        self._add(f"backward {experts}", more=recomputed + gradients + costs.returned[block], then=gradients)
        self._add(f"gradients {experts}", then=-gradients)
        self._add(f"freed {experts}")

    def spanned(self, outer: str, inner: Sequence[str], *, tied: bool) -> None:
        """Walk through a group of embedding, norm and output around the blocks.

        The gradients of norm and output wait for the embedding's, which is added to the output's if they are tied.
        """
        costs = self._costs
        self._add("forward")
        self._add(f"forward {outer}")
        self._forward(inner)
        self._add("last layers", more=costs.saved[outer] + costs.working[outer], then=costs.saved[outer])
        self._add(f"after-forward {outer}")
        self._add("backward", more=costs.gradients_of_logits)
        gradients, embedding = costs.gradients[outer], costs.gradient_of_embedding
        first = gradients if tied else gradients - embedding
        self._add(f"backward {outer}", more=first + costs.working[outer], then=first - costs.saved[outer])
        self._backward(inner)
        self._add("first layer", more=embedding, then=gradients - first)
        self._add(f"gradients {outer}", then=-gradients)
        self._add(f"freed {outer}")
        self._add("end")

    def backward_of_input(self, names: Sequence[str], *, keeps: bool) -> None:
        """Compute the first half of a backward; with `keeps` the gradient of its input stays afterwards.

        FSDP takes the gradients that second halves have left, see `pipeline.added_up_at_once`.
        """
        self._add("backward", more=self._costs.gradients_of_logits if "output" in names else 0)
        for name in reversed(names):
            arrived = self._costs.arrived[name]
            self._add(
                f"backward {name}", more=arrived + self._costs.working[name], then=arrived - self._costs.freed[name]
            )
            self._add(f"gradients {name}", then=0 if self._stay else -self._taken(name))
            self._add(f"freed {name}")
        self._add("end", then=self._costs.transferred * keeps)

    def backward_of_parameters(self, names: Sequence[str]) -> None:
        """Compute the second half of a backward, in the order of forward."""
        costs = self._costs
        self._add("backward")
        for name in names:
            gradients = costs.gradients[name]
            stay = 0 if name in self._waiting else gradients
            self._waiting.add(name)
            self._add("backward", more=gradients, then=stay - costs.arrived[name])
        self._add("backward", then=sum(costs.freed[name] - costs.saved[name] for name in names))

    def hold_sent(self, number: int) -> None:
        """Hold so many tensors that the stage has sent until all actions are done."""
        self._add("sent", then=number * self._costs.transferred)

    def _taken(self, name: str) -> int:
        """Take the gradients of a group that wait; returns their bytes."""
        taken = self._costs.gradients[name] if name in self._waiting else 0
        self._waiting.discard(name)
        return taken

    def reduce(self, names: Sequence[str]) -> None:
        """Release gradients that wait, in the order of forward, as a pipeline reduces them."""
        self._add("reduce")
        for name in names:
            self._add(f"gradients {name}", then=-self._taken(name))
            self._add(f"freed {name}")
        self._add("end")


def _groups(workload: Workload) -> tuple[Group, ...]:
    """Return the groups that have parameters."""
    return present(groups(workload.config), _unpadded(workload))


def _unpadded(workload: Workload) -> dict[str, int]:
    """Return the bytes of the gradients of each group, without padding, in the dtype of computation."""
    config, dims = workload.config, workload.dims
    local = shards(workload.decoder.shapes(), tp=dims.tp, tp_rank=0)
    nbytes: dict[str, int] = {}
    for sharding in shardings(local, config, shards=dims.dp_shard).values():
        nbytes[sharding.group] = nbytes.get(sharding.group, 0) + sharding.numel * _compute_bytes(workload)
    return nbytes


def _compute_bytes(workload: Workload) -> int:
    return _FP32_BYTES if dtype_policy(workload.config.precision).compute == "float32" else _FP32_BYTES // 2


def _is_block(group: str) -> bool:
    return group.startswith("layers.") and group.count(".") == 1


class _Elements(NamedTuple):
    """Elements of each token in a block, of the dtype of computation."""

    sharded: int
    """Elements that tensor parallelism shards, by heads, hidden units or, with sequence parallelism, tokens."""
    replicated: int = 0
    """Elements that each rank has: of gathered inputs, and of results that are summed over the ranks afterwards."""

    def on_rank(self, tp: int, *, each_bytes: int) -> int:
        """Return the bytes of a rank."""
        return self.sharded * each_bytes // tp + self.replicated * each_bytes


class _Largest:
    """The largest of elements that are not there at once."""

    def __init__(self, *alternatives: _Elements) -> None:
        self.alternatives = alternatives

    def on_rank(self, tp: int, *, each_bytes: int) -> int:
        """Return the bytes of a rank."""
        return max(elements.on_rank(tp, each_bytes=each_bytes) for elements in self.alternatives)


Width = Callable[[Decoder, int], _Elements | _Largest]


def _everything(decoder: Decoder, layer: int) -> _Elements:
    """Elements that a block without checkpointing saves for backward.

    They are inputs and outputs of norms (of those whose output is saved as another's input, the input), queries, keys
    and values (repeated for each query head), the output of attention, and four times the hidden layer of the
    feed-forward (gate, its activation, up, their product). Experts have their own copies of a token and of its result.
    With tensor parallelism the outputs of both norms before products are saved as they were gathered, and each rank has
    copies of all tokens and results, of whose experts it has a part.
    """
    attention = 2 * decoder.n_heads * (decoder.head_width + decoder.value_width)
    queries, keys = (heads * decoder.head_width for heads in (decoder.n_heads, decoder.n_kv_heads))
    inputs = {"q_norm": queries, "k_norm": keys}
    norms = 2 * decoder.dim + sum(inputs.get(norm, decoder.dim) for norm in decoder.norms)
    if decoder.latents:
        norms += 2 * (decoder.latents.q_rank + decoder.latents.kv_rank)
    experts = decoder.experts_of(layer)
    if experts is None:
        return _Elements(norms + attention + 4 * decoder.ffn_dim, 2 * decoder.dim)
    hidden = 4 * (experts.active * experts.ffn_dim + experts.shared_ffn_dim)
    return _Elements(norms + attention + hidden, 2 * decoder.dim + experts.active * 2 * decoder.dim)


def _after_attention(decoder: Decoder) -> _Elements:
    """Elements of `_everything` that a block without experts saves once it has the output of attention."""
    after = ("post_attention_norm", "post_ffn_norm")
    norms = decoder.dim * (1 + sum(norm in after for norm in decoder.norms))
    return _Elements(norms + 4 * decoder.ffn_dim, decoder.dim)


def _output_of_attention(decoder: Decoder, _layer: int) -> _Elements:
    return _Elements(decoder.n_heads * decoder.value_width)


def _held_in_attention(decoder: Decoder, layer: int) -> _Elements:
    """Elements of `_everything` that are there while attention computes its output."""
    every, after = _everything(decoder, layer), _after_attention(decoder)
    output = _output_of_attention(decoder, layer)
    return _Elements(every.sharded - after.sharded - output.sharded, every.replicated - after.replicated)


def _added_in_attention_backward(decoder: Decoder, _layer: int) -> _Elements:
    """Elements of the gradients of the block's input and of attention's output, less those that backward has freed."""
    after = _after_attention(decoder)  # and the copy of attention's output, as many elements as its gradient
    return _Elements(decoder.dim - after.sharded, -after.replicated)


def _input(decoder: Decoder, _layer: int) -> _Elements:
    return _Elements(decoder.dim)


def _products(decoder: Decoder, layer: int) -> _Elements:
    """Elements of a block's input and of the outputs of its matrix products and of attention."""
    sharded, full = _outputs(decoder, layer)
    return _Elements(decoder.dim + decoder.n_heads * decoder.value_width + sum(sharded), sum(full))


def _every_second_product(decoder: Decoder, layer: int) -> _Elements:
    """Elements of `_products` without the outputs of the second, fourth, ... product.

    Source: `_get_custom_policy` in torchtitan/distributed/activation_checkpoint.py at v0.1.0, for blocks without
    experts and biases, whose products are other operators.
    """
    kept = [product.outputs for product in decoder.products(layer)][::2]
    return _Elements(decoder.dim + decoder.n_heads * decoder.value_width + sum(kept))


def _outputs(decoder: Decoder, layer: int) -> tuple[list[int], list[int]]:
    """Return the elements of the products' outputs: those that are sharded, and those of which each rank has all."""
    sharded: list[int] = []
    full: list[int] = []
    for product in decoder.products(layer):
        sizes = full if product.name.rpartition(".")[2] in _NOT_SHARDED else sharded
        sizes.append(product.active * product.outputs)
    return sharded, full


def _largest(decoder: Decoder, layer: int) -> _Largest:
    sharded, full = _outputs(decoder, layer)
    return _Largest(_Elements(max(sharded)), _Elements(0, max(full)))


def _returned(decoder: Decoder, layer: int) -> _Largest:
    """Elements of the largest output, or in the backward of the feed-forward's product of gate and up.

    There the product's gradient, those of its two factors and the block's own are held, and the product is not.
    """
    experts = decoder.experts_of(layer)
    width = experts.active * experts.ffn_dim if experts else decoder.ffn_dim
    return _Largest(*_largest(decoder, layer).alternatives, _Elements(2 * width + decoder.dim))


def _exchanged(decoder: Decoder, layer: int) -> _Elements:
    """Elements of the rows of an exchange with experts of other ranks at its end, of which only the last are kept.

    These are the rows that were sent and those that have arrived, their results, and the results that have returned.
    Experts compute while the first two are there. Each tensor-parallel rank exchanges the rows of all tokens.
    """
    experts = decoder.experts_of(layer)
    return _Elements(0, 4 * experts.active * decoder.dim if experts else 0)


def _returned_in_exchange(decoder: Decoder, layer: int) -> _Elements:
    """Elements of the gradients of rows that are sent and of those that arrive."""
    experts = decoder.experts_of(layer)
    return _Elements(0, 2 * experts.active * decoder.dim if experts else 0)


def _gradients(decoder: Decoder, layer: int) -> _Elements:
    """Elements of the gradients of the results of a block's norms and linear layers."""
    sharded, full = _outputs(decoder, layer)
    return _Elements(sum(sharded), 2 * decoder.dim + sum(full))


KEPT: dict[str, Width] = {
    "none": _everything,
    "selective": _products,
    "selective-op": _every_second_product,
    "full": _input,
}
"""Elements that a block keeps for backward, by kind of activation checkpointing."""
LOGITS = ("kept", "kept-fp32", "freed", "chunked")
"""Uses of logits by a loop: kept in backward, as computed or in fp32, deleted before, or computed in chunks."""
