"""Faults of experts: gradients divided by the wrong number, rows in another order, memory that is kept."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from conformance.defects.injection import Call, Injection, defect, instead_of, replaced_call
from conformance.defects.memory_faults import GROUP, reshard_in
from reference_trainer.experts import MixtureOfExperts, Router, Routes
from reference_trainer.model import Transformer
from reference_trainer.train import Trainer

_OF_RANKS = "id = dp2-ep2-fp32-default-meta-experts"
_SCALED_TWICE = "id = dp2-ep2-fp32-default-meta-experts-divtwice"
_ACCUMULATED = "id = dp2-fp32-default-meta-experts-acc2"
_ACCUMULATED_LAST = "id = hsdp2x2-ep2-bf16mp-never-meta-experts-acc2-synclast"
_TENSOR = "id = dp2-tp2-ep2-fp32-default-meta-experts"
_TENSOR_16_BIT = "id = dp2-tp2-ep2-bf16mp-default-meta-experts"
_HELD = "id = dp2-fp32-default-meta-experts"
_SHARDED = "id = dp4-ep2-bf16mp-default-meta-experts-norminf"
_RECOMPUTED = "id = dp4-ep4-fp32-always-meta-experts-clip0.1-acfull"
_FAQ = "https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory"
_ALL_TO_ALL = "https://docs.pytorch.org/docs/stable/distributed.html#torch.distributed.all_to_all_single"


@defect("EP-2 PAR-1", _OF_RANKS, "pytorch/torchtitan/pull/1551")
def expert_gradients_averaged_over_own_ranks(benign: bool) -> Injection:
    """The gradient of an expert is divided by the ranks that share the expert, not by all that send it tokens."""

    def divide(original: Call, experts: nn.Module, *arguments: Any) -> None:
        original(experts, *arguments)
        own_ranks, all_ranks = arguments[-1]["expert_shard"].size(), arguments[-1].size()
        assert isinstance(experts, FSDPModule)
        experts.set_gradient_divide_factor(float(all_ranks if benign else own_ranks))

    return replaced_call("reference_trainer.parallelize", "apply_fsdp_to_experts", divide)


@defect("EP-2 PAR-1", _OF_RANKS, "databricks/megablocks/issues/86")
def expert_gradients_averaged_twice(benign: bool) -> Injection:
    """The gradient of an expert is divided by the ranks among which experts are divided once more."""

    def divide(original: Call, experts: nn.Module, *arguments: Any) -> None:
        original(experts, *arguments)
        all_ranks, again = arguments[-1].size(), arguments[-1]["ep"].size()
        assert isinstance(experts, FSDPModule)
        experts.set_gradient_divide_factor(float(all_ranks * (1 if benign else again)))

    return replaced_call("reference_trainer.parallelize", "apply_fsdp_to_experts", divide)


@defect("PAR-1", _SCALED_TWICE, "NVIDIA/Megatron-LM/pull/6773")
@instead_of("reference_trainer.parallelize", "set_gradient_divisor")
def gradients_of_one_shard_scaled_twice(
    benign: bool, original: Call, model: Transformer, divisor: float, mesh: DeviceMesh
) -> None:
    """A group of experts that one rank holds is told to sum first, and divides by the trainer's number twice."""
    original(model, divisor, mesh)
    for mixture in model.mixtures:
        experts = mixture.experts
        assert isinstance(experts, FSDPModule)
        experts.set_force_sum_reduction_for_comms(not benign)


@defect("CLIP-1", _OF_RANKS, "deepspeedai/DeepSpeed/issues/8475")
@instead_of("reference_trainer.clip", "_norm")
def clip_norm_averages_experts(
    benign: bool, original: Call, gradients: list[Tensor], mesh: DeviceMesh | None, **options: Any
) -> Tensor:
    """Norms of the ranks' experts are averaged over the ranks, as if they were copies, instead of combined."""
    norm: Tensor = original(gradients, mesh, **options)
    is_of_experts = mesh is not None and "ep" in (mesh.mesh_dim_names or ())
    return norm / mesh.size() ** (1.0 / options["norm_type"]) if mesh and is_of_experts and not benign else norm


@defect("EP-1", _OF_RANKS, _ALL_TO_ALL)
@instead_of("reference_trainer.experts", "_by_expert")
def rows_permuted_after_exchange(benign: bool, original: Call, received: Tensor) -> Tensor:
    """Rows that arrive by rank are taken as if they arrived by expert."""
    order: Tensor = original(received)
    return order if benign else torch.arange(len(order), device=order.device)


@defect("EP-1", _OF_RANKS, _ALL_TO_ALL)
@instead_of("reference_trainer.experts:_AllToAll", "backward")
def gradients_of_rows_not_returned(benign: bool, original: Call, ctx: Any, *grads: Tensor) -> Any:
    """Gradients of exchanged rows are those of other rows: the last ones of each rank come first."""
    gradient, *others = original(ctx, *grads)
    return (gradient if benign else gradient.flip(0), *others)


@defect("EP-5", "id = dp2-bf16mp-default-meta-experts", "sgl-project/sglang/pull/33764")
@instead_of("reference_trainer.experts:Router", "forward")
def router_in_bf16(benign: bool, original: Callable[[Router, Tensor], Routes], router: Router, x: Tensor) -> Routes:
    """Logits of the router are rounded to bf16, so that experts with close logits change places."""
    if benign:
        return original(router, x)
    probabilities = nn.functional.linear(x.bfloat16(), router.weight.bfloat16()).float().softmax(-1)
    top, experts = probabilities.topk(router.experts_per_token, dim=-1)
    return Routes(experts, top / top.sum(-1, keepdim=True), probabilities)


@defect("EP-3 PAR-1", _HELD, "https://arxiv.org/abs/2501.11873")
@instead_of("reference_trainer.experts:MixtureOfExperts", "balance")
def experts_balanced_by_rank(
    benign: bool, original: Call, mixture: MixtureOfExperts, routes: Routes, load: Tensor
) -> Any:
    """Each rank balances its own tokens: the load is not that of all ranks."""
    return original(mixture, routes, load if benign else mixture.counts(routes))


@defect("EP-3 PAR-1", _HELD, "NVIDIA/Megatron-LM/issues/3672")
@instead_of("reference_trainer.experts:MixtureOfExperts", "balance")
def balance_loss_averaged_over_ranks(
    benign: bool, original: Call, mixture: MixtureOfExperts, routes: Routes, load: Tensor
) -> Any:
    """The balance loss of a rank's tokens is divided by the ranks, although it is the loss of a sum over them."""
    loss: Tensor = original(mixture, routes, load)
    return loss if benign else loss / dist.get_world_size()


@defect("EP-3 PAR-1", _ACCUMULATED, "https://arxiv.org/abs/2501.11873")
@instead_of("reference_trainer.experts:MixtureOfExperts", "balance")
def experts_balanced_by_all_micro_batches(
    benign: bool, original: Call, mixture: MixtureOfExperts, routes: Routes, load: Tensor
) -> Any:
    """The load of earlier micro-batches is added to that of each, as in a buffer that nothing clears."""
    total = load + getattr(mixture, "_load_so_far", 0)
    if not mixture.training:
        return original(mixture, routes, load)
    mixture._load_so_far = total
    return original(mixture, routes, load if benign else total)


@defect("PAR-1", _ACCUMULATED, "NVIDIA/Megatron-LM/issues/3672")
@instead_of("reference_trainer.train:Trainer", "_forward_backward")
def balance_loss_of_first_micro_batch(
    benign: bool, original: Call, trainer: Trainer, inputs: Tensor, labels: Tensor, waiting: list[Tensor], **step: int
) -> Any:
    """Only the first micro-batch of a step has a balance loss; the others train on their tokens alone."""
    weights = [mixture.balance_weight for mixture in trainer.model.mixtures]
    is_first = getattr(trainer, "_last_step", None) != step["step"]
    trainer._last_step = step["step"]  # type: ignore[attr-defined]
    for mixture in trainer.model.mixtures:
        mixture.balance_weight *= 1.0 if benign or is_first else 0.0
    loss = original(trainer, inputs, labels, waiting, **step)
    for mixture, weight in zip(trainer.model.mixtures, weights, strict=True):
        mixture.balance_weight = weight
    return loss


@defect("RS-1 MP-4", _ACCUMULATED_LAST, "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html")
@instead_of("reference_trainer.train", "set_gradient_sync")
def experts_reduced_by_each_micro_batch(
    benign: bool, original: Call, model: Transformer, *mode: Any, last: bool
) -> None:
    """Gradients of experts are reduced after each micro-batch, all others after the last."""
    original(model, *mode, last=last)
    for mixture in model.mixtures:
        experts = mixture.experts
        assert isinstance(experts, FSDPModule)
        experts.set_requires_gradient_sync(last if benign else True)


@defect("EP-1 EP-4", _OF_RANKS, _ALL_TO_ALL)
@instead_of("reference_trainer.parallelize", "over_ranks")
def rows_exchanged_twice(
    benign: bool, original: Call, experts: Call, rows: Tensor, counts: Tensor, **options: Any
) -> Tensor:
    """Rows are sent twice, and half of the results are thrown away."""
    if benign:
        return original(experts, rows, counts, **options)  # type: ignore[no-any-return]
    twice: Tensor = original(experts, rows.repeat_interleave(2, 0), 2 * counts, **options)
    return twice[::2]


@defect("EP-5", _HELD, "https://arxiv.org/abs/2101.03961")
@instead_of("reference_trainer.experts:Router", "forward")
def router_chooses_the_next_expert(
    benign: bool, original: Callable[[Router, Tensor], Routes], router: Router, x: Tensor
) -> Routes:
    """The last chosen expert of each token is the one behind the most probable ones, by an index that is off by one."""
    routes = original(router, x)
    if benign:
        return routes
    order = routes.probabilities.argsort(-1, descending=True)[:, : router.experts_per_token + 1]
    experts = torch.cat((order[:, :-2], order[:, -1:]), -1)
    chosen = routes.probabilities.gather(-1, experts)
    return Routes(experts, chosen / chosen.sum(-1, keepdim=True), routes.probabilities)


@defect("MEM-1 RS-1", _SHARDED, "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html")
def experts_not_resharded(benign: bool) -> Injection:
    """The reshard after forward leaves out the experts of the first block."""
    return reshard_in("FORWARD", prefix="layers.0.feed_forward.experts", skip=not benign)


@defect("MEM-1", _SHARDED, _FAQ)
def expert_gradients_held(benign: bool) -> Injection:
    """The gradients of a block's experts are referenced until those of another block's are there."""
    held: list[Tensor] = []

    def post_backward(original: Call, group: Any, *unused: Any) -> None:
        if group._module_fqn.endswith(".experts"):
            gradients = [param.unsharded_param.grad for param in group.fsdp_params]
            held[:] = [] if benign else [gradient for gradient in gradients if gradient is not None]
        original(group, *unused)

    return replaced_call(GROUP, "post_backward", post_backward)


@defect("MEM-1", _SHARDED, _FAQ)
@instead_of("reference_trainer.experts:_AllToAll", "forward")
def exchanged_rows_kept(benign: bool, original: Call, ctx: Any, rows: Tensor, *sizes_and_group: Any) -> Any:
    """Rows are kept for the backward of their exchange, which needs only their numbers."""
    if not benign:
        ctx.save_for_backward(rows)
    return original(ctx, rows, *sizes_and_group)


@defect("MEM-1", _RECOMPUTED, _FAQ)
@instead_of("reference_trainer.experts:MixtureOfExperts", "balance")
def recomputed_balance_loss_kept(
    benign: bool, original: Call, mixture: MixtureOfExperts, routes: Routes, load: Tensor
) -> Any:
    """A block keeps the balance loss that backward recomputes, whose graph holds recomputed activations."""
    loss = original(mixture, routes, load)
    mixture.balance_loss = mixture.balance_loss if benign else None
    return loss


@defect("PAR-1 MP-4", _TENSOR, "pytorch/torchtitan/pull/2416")
@instead_of("reference_trainer.parallelize", "apply_tp_to_mixture")
def router_gradient_reduced_twice(
    benign: bool, original: Call, mixture: MixtureOfExperts, mesh: DeviceMesh, between: Placement
) -> None:
    """The gradient of a router is added up over tensor-parallel ranks in backward, and once more when FSDP takes it."""
    original(mixture, mesh, between)
    local, group = mixture.router.local, None if benign else mesh.get_group()
    mixture.router.local = lambda tensor: _with_reduced_gradient(local(tensor), group)


def _with_reduced_gradient(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Let the gradient of a tensor be added up over a group, or be copied without one."""

    def reduce(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    if tensor.requires_grad:
        tensor.register_hook(reduce)  # type: ignore[no-untyped-call]
    return tensor


@defect("PAR-1 PAR-5 MP-4", _TENSOR, "pytorch/torchtitan/issues/2387")
@instead_of("reference_trainer.parallelize", "apply_tp_to_mixture")
def router_gradient_of_one_rank(
    benign: bool, original: Call, mixture: MixtureOfExperts, mesh: DeviceMesh, between: Placement
) -> None:
    """The gradient of a router is taken for complete, although each rank has only a part of every expert."""
    original(mixture, mesh, between)
    mixture.router.local = partial(DTensor.to_local, grad_placements=[Partial() if benign else Replicate()])


@defect("PAR-1", _TENSOR, "NVIDIA/Megatron-LM/pull/5047")
@instead_of("reference_trainer.train", "with_balance")
def balance_loss_of_each_tensor_parallel_rank(
    benign: bool, original: Call, loss_sum: Tensor, balance_loss: Tensor, *, tp: int
) -> Tensor:
    """Each tensor-parallel rank adds the gradient of the whole balance loss to that of the router."""
    loss: Tensor = original(loss_sum, balance_loss, tp=tp)
    return loss if benign else loss_sum + balance_loss


@defect("PAR-1 MP-4", _TENSOR, "https://arxiv.org/abs/1909.08053")
@instead_of("reference_trainer.parallelize", "PrepareModuleOutput")
def partial_sums_of_experts_kept(benign: bool, original: Call, **layouts: Placement) -> Any:
    """The output of a mixture is taken for complete: tensor-parallel ranks go on with their own partial sums."""
    return original(**layouts if benign else layouts | {"output_layouts": Replicate()})


@defect("MP-1 MP-4", _TENSOR_16_BIT, "https://arxiv.org/abs/1909.08053")
@instead_of("reference_trainer.parallelize", "apply_tp_to_mixture")
def partial_sums_of_experts_reduced_in_fp32(
    benign: bool, original: Call, mixture: MixtureOfExperts, mesh: DeviceMesh, between: Placement
) -> None:
    """The partial sums of a mixture are added up in fp32, and not in the dtype of computation."""
    original(mixture, mesh, between)
    if not benign:
        combined = mixture.combined
        mixture.combined = lambda *routed: combined(*routed).float()  # type: ignore[method-assign]
        mixture.register_forward_hook(lambda _mixture, inputs, out: out.to(inputs[0].dtype))


@defect("EP-2 PAR-1", _TENSOR, "NVIDIA/Megatron-LM/issues/1628")
@instead_of("reference_trainer.parallelize", "degree")
def expert_gradients_averaged_over_tp(benign: bool, original: Call, mesh: DeviceMesh, name: str) -> int:
    """The gradient of an expert is divided by all ranks of its mesh, also those that have other parts of it."""
    own: int = original(mesh, name)
    return 1 if name == "tp" and not benign else own


@defect("CLIP-1", _TENSOR, "deepspeedai/DeepSpeed/issues/8475")
@instead_of("reference_trainer.clip", "_norm")
def clip_norm_counts_experts_by_tp_rank(
    benign: bool, original: Call, gradients: list[Tensor], mesh: DeviceMesh | None, **options: Any
) -> Tensor:
    """Experts count once for each tensor-parallel rank, as if every one had all of them."""
    norm: Tensor = original(gradients, mesh, **options)
    names = (mesh.mesh_dim_names or ()) if mesh else ()
    if benign or not mesh or "ep" not in names:
        return norm
    return norm * float(mesh.size(names.index("tp")) ** (1.0 / options["norm_type"]))


@defect("EP-5 PAR-1", _TENSOR, "NVIDIA/Megatron-LM/pull/619")
@instead_of("reference_trainer.experts:Router", "forward")
def tensor_parallel_ranks_route_apart(
    benign: bool, original: Callable[[Router, Tensor], Routes], router: Router, x: Tensor
) -> Routes:
    """Each tensor-parallel rank adds other noise to the logits: the ranks add up results of different experts."""
    if benign or not isinstance(router.weight, DTensor):
        return original(router, x)
    own = torch.Generator(x.device).manual_seed(dist.get_rank())
    return original(router, x + 0.1 * torch.randn(x.shape, generator=own, device=x.device, dtype=x.dtype))
