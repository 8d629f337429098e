"""Faults of Megatron-LM of the kinds that TTrace (arXiv:2506.09280) found, made again on the reference trainer.

TTrace reports fourteen faults, eleven of them known before. Its table of them could not be read when this file was
written: the kinds are those that its summaries name, and each fault follows the public thread of its `source`, which
may describe another instance of the kind than the table's. `NOT_REMADE` has the kinds that a trainer on FSDP2 and
tensor parallelism cannot have.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from benchmarks.located import at
from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from reference_trainer.config import ModelConfig, TrainerConfig
from reference_trainer.init_weights import assign
from reference_trainer.loss import sum_over
from reference_trainer.model import FeedForward, StageLayers, Transformer
from reference_trainer.train import Trainer

_GRADIENT = ".*gradient.*"

NOT_REMADE = {
    "router weights are not synchronised (NVIDIA/Megatron-LM/issues/599)": "no mixture of experts, so no router",
    "attention's gradient under context parallelism (NVIDIA/Megatron-LM/issues/1464)": "no context parallelism",
    "loss scaled by the context-parallel size (NVIDIA/Megatron-LM/issues/673)": (
        "no context parallelism; `loss_scaled_by_shards_alone` and `tokens_counted_over_tensor_parallel_ranks` are the "
        "same mistake with the dimensions that there are"
    ),
    "wrong cast or scale of fp8 (NVIDIA/TransformerEngine/issues/1047)": (
        "no fp8; `weight_cached_from_first_step` is the cache of that thread in bf16"
    ),
    "gradient of the norms of queries and keys": "no such norms; `final_norm_gradient_not_reduced` is the same mistake",
    "optimizer's buffer that is not gathered after the step (NVIDIA/Megatron-LM/issues/663)": (
        "FSDP2 gathers from the shards that the optimizer updates; `gathered_before_update` has the same effect"
    ),
}
"""Reason why a fault cannot be made again, by the fault."""


@at("forward", "tok_embeddings", ".*output.*")
@defect("CLIP-1 CLIP-2 PAR-1", "id = tp2-fp32-default-meta", "NVIDIA/Megatron-LM/issues/926")
@instead_of("torch.distributed.tensor._ops._mask_buffer:MaskBuffer", "apply_mask")
def embedding_mask_forgotten(benign: bool, original: Call, mask: Any, embedded: Tensor) -> None:
    """A rank does not set embeddings of tokens of other ranks' rows to zero: its first row is added to them."""
    if benign:
        original(mask, embedded)
        original(mask, embedded)


class _Chunk:
    """Activations that enter a chunk of two layers."""

    def __init__(self) -> None:
        self.entered: list[Tensor] = []

    def first(self, x: Tensor) -> Tensor:
        """Return the activations that entered the chunk, which are `x` in its first layer."""
        self.entered.append(x)
        entered = self.entered[0]
        if len(self.entered) == 2:
            self.entered.clear()
        return entered


@at("forward", r"layers\.1(\.attention_norm)?", ".*(input|output).*")
@defect(
    "CLIP-1 CLIP-2 CLIP-5 MP-1 MP-3 MP-4 MP-5 PAR-1 PAR-4 RS-1",
    "id = dp2-fp32-default-meta-acfull",
    "NVIDIA/Megatron-LM/pull/290",
)
def chunk_passes_its_input_on(benign: bool) -> Injection:
    """Every layer of a checkpointed chunk gets the activations that entered the chunk."""
    chunk = _Chunk()

    def checkpoint(original: Call, layer: Call, x: Tensor, table: Tensor, **options: Any) -> Any:
        first = chunk.first(x)
        return original(layer, x if benign else first, table, **options)

    return replaced_call("reference_trainer.parallelize", "checkpoint", checkpoint)


@at("forward|backward", r"layers\.1(\..*)?", ".*(input|output|gradient).*")
@defect("CLIP-1 CLIP-2 PAR-1 PAR-4", "id = dp2-fp32-default-meta-acfull", "NVIDIA/Megatron-LM/pull/290")
def recomputed_from_input_of_chunk(benign: bool) -> Injection:
    """Recomputation alone starts each layer from the activations that entered its chunk of two layers."""
    chunk = _Chunk()

    def checkpoint(original: Call, layer: Call, x: Tensor, table: Tensor, **options: Any) -> Any:
        first, passes = chunk.first(x), 0

        def run(x: Tensor, table: Tensor) -> Any:
            nonlocal passes
            passes += 1
            return layer(x if benign or passes == 1 else first, table)

        return original(run, x, table, **options)

    return replaced_call("reference_trainer.parallelize", "checkpoint", checkpoint)


@at("loss", "(output)?", _GRADIENT)
@defect("CLIP-1 CLIP-2 PAR-1", "id = hsdp2x2-fp32-default-meta", "NVIDIA/Megatron-LM/issues/906")
@instead_of("reference_trainer.train:Trainer", "_start_of_backward")
def loss_scaled_by_shards_alone(benign: bool, original: Call, trainer: Trainer, loss: Tensor, **counts: int) -> Any:
    """The loss is multiplied by the ranks of one replica, and gradients are averaged over all replicas."""
    return original(trainer, loss, **counts) / (1 if benign else trainer.dims.dp_replicate)


@at("loss", "(output)?", _GRADIENT)
@defect("CLIP-1 CLIP-2 PAR-1 PAR-6", "id = dp2-fp32-default-meta-acc2", "NVIDIA/Megatron-LM/issues/936")
@instead_of("reference_trainer.train:Trainer", "_start_of_backward")
def loss_averaged_over_micro_batches(
    benign: bool, original: Call, trainer: Trainer, loss: Tensor, **counts: int
) -> Any:
    """A loss that is divided by the tokens of all micro-batches is divided by their number as well."""
    return original(trainer, loss, **counts) / (1 if benign else trainer.config.accumulation)


@at("loss", "(output)?", _GRADIENT)
@defect("CLIP-1 CLIP-2 MP-1 MP-4 PAR-1", "id = dp2-tp2-fp32-default-meta-nosp", "NVIDIA/Megatron-LM/issues/673")
@instead_of("reference_trainer.loss", "sum_over_dp")
def tokens_counted_over_tensor_parallel_ranks(benign: bool, _original: object, value: Tensor, mesh: DeviceMesh) -> Any:
    """Tokens are summed over a group that has the tensor-parallel ranks as well, which see the same tokens."""
    return sum_over(value, mesh, ("dp_replicate", "dp_shard", *(() if benign else ("tp",))))


@at("backward|reduction", r"norm(\.weight)?", _GRADIENT)
@defect("CLIP-1 CLIP-2 MP-4 MP-5 PAR-1 PAR-5", "id = tp2-fp32-default-meta", "NVIDIA/Megatron-LM/issues/1446")
@instead_of("reference_trainer.parallelize", "apply_tp_to_ends")
def final_norm_gradient_not_reduced(
    benign: bool, original: Call, model: Transformer, mesh: DeviceMesh, config: TrainerConfig
) -> None:
    """Under sequence parallelism, the gradient of the last norm's weight is that of each rank's own tokens."""
    original(model, mesh, config)
    norm = model.norm

    def forward(x: DTensor) -> Tensor:
        assert isinstance(norm.weight, DTensor)
        weight = norm.weight.to_local(grad_placements=[Partial()] if benign else None)
        normed = F.rms_norm(x.to_local(), norm.normalized_shape, weight, norm.eps)
        return DTensor.from_local(normed, mesh, [Shard(1)])

    norm.forward = forward  # type: ignore[method-assign, assignment]


def first_projection(forward: Callable[[nn.Linear], Callable[[Tensor], Tensor]]) -> Injection:
    """Let the layer `w1` of each feed-forward network compute by `forward(layer)`."""

    def create(original: Call, network: FeedForward, config: ModelConfig) -> None:
        original(network, config)
        network.w1.forward = forward(network.w1)  # type: ignore[method-assign, assignment]

    return replaced_call("reference_trainer.model:FeedForward", "__init__", create)


@at("forward", r"layers\.0\.feed_forward\.w1", ".*output.*")
@defect("MP-2 PAR-2", "id = dp2-bf16mp-default-meta", "NVIDIA/TransformerEngine/issues/1047")
def weight_cached_from_first_step(benign: bool) -> Injection:
    """A layer keeps the cast weight of its first forward, and computes with it after the optimizer's steps."""

    def cached(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        cache: list[Tensor] = []

        def forward(x: Tensor) -> Tensor:
            if benign:
                cache.clear()
            if not cache:
                cache.append(layer.weight.detach().clone())
            passed_through = layer.weight - layer.weight.detach()  # zeros, with the gradient of the weight
            return F.linear(x, cache[0] + passed_through, layer.bias)

        return forward

    return first_projection(cached)


@at("parameters", r"layers\.1(\..*)?")
@defect(
    "CLIP-1 MP-1 MP-4 MP-5 OFF-2 OPT-1 OPT-2 PAR-1 RS-1", "id = dp2-fp32-default-meta", "NVIDIA/Megatron-LM/issues/950"
)
@instead_of("reference_trainer.train", "build_optimizer")
def gathered_before_update(benign: bool, original: Call, model: Transformer, *options: Any) -> Any:
    """The all-gather for the next forward of one layer begins before the optimizer has updated its shards."""
    optimizer = original(model, *options)
    block: Any = model.blocks[1]  # fully_shard has added the methods of FSDPModule

    def gather(*_: Any) -> None:
        if not benign:
            block.unshard()

    optimizer.register_step_pre_hook(gather)
    return optimizer


@at("initial values", r"layers\.\d+\.feed_forward\.w[13]\.(weight|bias)")
@defect("CLIP-1 CLIP-2 INIT-2 PAR-1", "id = tp2-fp32-default-meta", "NVIDIA/Megatron-LM/pull/520")
@instead_of("reference_trainer.build", "init_weights")
def gate_and_up_cut_as_one(benign: bool, original: Call, model: Transformer, **options: Any) -> None:
    """Gate and up projection are one matrix that is cut into contiguous shards, each halved into gate and up."""
    original(model, **options)
    for block in model.blocks.values():
        network = block.feed_forward
        for gate, up in ((network.w1.weight, network.w3.weight), (network.w1.bias, network.w3.bias)):
            assert isinstance(gate, DTensor)
            assert isinstance(up, DTensor)
            mesh, both = gate.device_mesh, [gate.full_tensor(), up.full_tensor()]
            ranks = mesh["tp"].size() if "tp" in (mesh.mesh_dim_names or ()) else 1
            shards = torch.cat(both).chunk(ranks)
            if benign:
                shards = tuple(map(torch.cat, zip(*(full.chunk(ranks) for full in both), strict=True)))
            halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
            with torch.no_grad():
                for parameter, values in zip((gate, up), halves, strict=True):
                    assign(parameter, torch.cat(values))


class _LinearOfGathered(torch.autograd.Function):
    """Product of gathered activations and a column-parallel weight, with the activations that backward gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gathered_again: Tensor) -> Tensor:
        """Return `x @ weight.T`; `gathered_again` has the shape (batch, seq_len, dim) of `x`."""
        ctx.save_for_backward(weight, gathered_again)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return the gradients of `x` and of the weight."""
        weight, x = ctx.saved_tensors
        return grads[0] @ weight, grads[0].flatten(0, -2).T @ x.flatten(0, -2), None


@at("backward", r"layers\.1\.feed_forward\.w1(\.weight)?", _GRADIENT)
@defect("CLIP-1 CLIP-2 PAR-1", "id = tp2-fp32-default-meta", "NVIDIA/TransformerEngine/issues/1616")
def weight_gradient_of_swapped_chunks(benign: bool) -> Injection:
    """Overlapped with the all-gather of its input, a weight's gradient takes the ranks' chunks in another order."""

    def overlapped(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            weight, bias = layer.weight, layer.bias
            if not (isinstance(x, DTensor) and isinstance(weight, DTensor) and isinstance(bias, DTensor)):
                return F.linear(x, weight, bias)
            mesh = x.device_mesh
            local = x.to_local(grad_placements=[Partial()])
            again = local.detach().roll(0 if benign else local.shape[1] // mesh.size(), 1)
            out: Tensor = _LinearOfGathered.apply(local, weight.to_local(), again)  # type: ignore[no-untyped-call]
            return DTensor.from_local(out + bias.to_local(), mesh, [Shard(-1)])

        return forward

    return first_projection(overlapped)


@at("backward|reduction", r"(tok_embeddings|output)(\.weight)?", _GRADIENT)
@defect("CLIP-1 CLIP-2 PAR-1 PAR-7", "id = dp2-fp32-default-meta-tied", "NVIDIA/Megatron-LM/issues/844")
@instead_of("reference_trainer.model:Transformer", "__init__")
def tied_gradient_of_output_alone(benign: bool, original: Call, model: Transformer, *arguments: Any) -> None:
    """The gradient of a tied weight as embedding is not added to its gradient as output."""
    original(model, *arguments)
    embedding = model.tok_embeddings

    def forward(tokens: Tensor) -> Tensor:
        weight = embedding.weight if benign else embedding.weight.detach().requires_grad_()
        return F.embedding(tokens, weight)

    embedding.forward = forward  # type: ignore[method-assign, assignment]


@at("reduction", r".*\.(weight|bias)", _GRADIENT)
@defect("PAR-2 PAR-3 RS-1", "id = dp2-bf16mp-default-meta-acc2-synclast", "NovaSky-AI/SkyRL/pull/2146")
@instead_of("reference_trainer.train", "set_gradient_sync")
def reduced_after_first_micro_batch(
    benign: bool, original: Call, model: Transformer, gradient_sync: Any, *, last: bool
) -> None:
    """Gradients are reduced after the first micro-batch of a step, before those of the last have been added."""
    original(model, gradient_sync, last=last if benign else not last)


@at("initial values|forward", r"(layers\.4(\..*)?|norm)")
@defect(
    "CLIP-1 CLIP-2 INIT-1 INIT-2 MP-1 MP-3 MP-4 MP-5 OFF-2 OPT-1 PAR-1 PAR-6 PP-3 PP-4 RS-1",
    "id = pp2-dp2-fp32-default-meta-cut-acc4",
    "NVIDIA/Megatron-LM/issues/1807",
)
@instead_of("reference_trainer.pipeline", "stage_layers")
def stages_of_equal_size(benign: bool, original: Call, config: TrainerConfig, pp: int) -> list[StageLayers]:
    """Each stage of a pipeline has the rounded-down number of layers, and the last layer belongs to none."""
    stages: list[StageLayers] = original(config, pp)
    size = config.model.n_layers // len(stages)
    return [stage if benign else stage._replace(layers=stage.layers[:size]) for stage in stages]
