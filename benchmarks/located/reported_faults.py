"""Twelve faults that users of FSDP2 and tensor parallelism reported, and that the catalogue does not have.

Mechanisms are those of public threads (`source`), of which the catalogue has others of the same area: each comment
names the nearest.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from benchmarks.located import at
from conformance.defects.clipping_faults import clipping_by_norm, norm_over
from conformance.defects.edits import Edit, edited
from conformance.defects.injection import Call, Injection, defect, instead_of
from conformance.defects.state_faults import after_resume
from conformance.instruments.sharding import local
from reference_trainer.config import OptimizerConfig
from reference_trainer.data import IGNORED_LABEL
from reference_trainer.model import Transformer
from reference_trainer.train import Trainer

_GRADIENT = ".*gradient.*"
_ANY_PARAMETER = r".*\.(weight|bias)"


# loss-local-token-mean divides by the valid tokens of a rank.
@at("loss", "(output)?", _GRADIENT)
@defect("CLIP-1 PAR-1", "id = dp2-fp32-default-meta", "huggingface/transformers/issues/34373")
@instead_of("reference_trainer.train", "count_valid_tokens")
def ignored_tokens_counted(
    benign: bool, original: Call, labels: list[Tensor], mesh: DeviceMesh, device: torch.device
) -> Any:
    """The loss is divided by the number of all tokens, and summed over those whose label is not ignored."""
    return original(labels if benign else [batch.clamp(min=0) for batch in labels], mesh, device)


# wrong-data-per-rank gives all ranks the same samples, tp-ranks-different-data takes the global rank.
@at("data", "")
@defect("CLIP-1 CLIP-2 DATA-1 PAR-1", "id = hsdp2x2-fp32-default-meta", "huggingface/accelerate/issues/3092")
@instead_of("reference_trainer.train", "dp_rank")
def sampler_ignores_replicas(benign: bool, original: Call, mesh: DeviceMesh) -> Any:
    """The sampler takes a rank's index among the shards alone: replicas train on the same samples."""
    return original(mesh) if benign else mesh.get_local_rank("dp_shard")


# ignored-params-unreduced leaves one parameter to the user.
@at("reduction", _ANY_PARAMETER, _GRADIENT)
@defect(
    "AXIS-1 CLIP-1 CLIP-2 CLIP-5 MP-1 MP-4 MP-5 PAR-1 PAR-5 RS-1",
    "id = dp2-fp32-default-meta",
    "verl-project/verl/issues/7493",
)
@instead_of("reference_trainer.parallelize", "fsdp_mesh")
def sharded_over_one_rank(benign: bool, original: Call, mesh: DeviceMesh) -> Any:
    """FSDP gets a mesh of one rank, by which gradients are reduced over no other rank."""
    if benign:
        return original(mesh)
    return init_device_mesh(mesh.device_type, (mesh.size(), 1), mesh_dim_names=("apart", "dp_shard"))["dp_shard"]


# clip-norm-local reduces over no dimension, clip-norm-over-replicas over one too many.
@at("clipping", "", ".*norm.*")
@defect(
    "CLIP-1 CLIP-2 CLIP-5 MP-1 MP-4 MP-5 PAR-1 PAR-5", "id = dp2-tp2-fp32-default-meta-nosp", "RLinf/RLinf/issues/1558"
)
def norm_of_tensor_parallel_shard(benign: bool) -> Injection:
    """The gradient norm is reduced over the ranks of FSDP alone, and lacks the other tensor-parallel shards."""

    def norm_over_fsdp(gradients: Any, order: float) -> Tensor:
        shard_group = gradients[0].device_mesh.get_group("dp_shard")
        powers = torch.stack([local(gradient).abs().pow(order).sum() for gradient in gradients]).sum()
        dist.all_reduce(powers, group=shard_group)
        return powers ** (1.0 / order)

    return clipping_by_norm(norm_over() if benign else norm_over_fsdp)


# rope-buffer-uninit leaves the table itself without values.
@at("initial values", "rope_table")
@defect("CLIP-1 CLIP-2 INIT-2 MP-3 PAR-1", "id = dp2-fp32-default-meta", "NovaSky-AI/SkyRL/issues/1709")
@instead_of("reference_trainer.init_weights", "rope_table")
def rotated_by_zero(benign: bool, original: Call, *arguments: Any, **options: Any) -> Any:
    """The RoPE table is computed from inverse frequencies that to_empty cleared: no position is rotated."""
    table = original(*arguments, **options)
    if benign:
        return table.clone()
    return torch.stack((torch.ones_like(table[0]), torch.zeros_like(table[1])))


# init-duplicate-shards gives all ranks the same shard, replica-desync concerns replicas.
@at("initial values", _ANY_PARAMETER)
@defect("CLIP-1 CLIP-2 INIT-2 PAR-1", "id = dp2-fp32-default-meta", "allenai/OLMo-core/pull/307")
@instead_of("reference_trainer.build", "init_weights")
def init_seeded_by_rank(benign: bool, original: Call, model: Transformer, *, seed: int) -> None:
    """Each rank adds its number to the seed, and keeps its shard of another full tensor than the others."""
    original(model, seed=seed + (0 if benign else dist.get_rank()))


# stale-unsharded-weights evaluates before the step, reshard-after-backward-skipped breaks FSDP itself.
@at("reduction|clipping|parameters", ".*")
@defect("CLIP-5 INIT-7 MP-1 MP-4 MP-5 OFF-2 OPT-1 RS-1", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/144289")
@instead_of("reference_trainer.build", "parallelize")
def unsharded_after_backward(benign: bool, original: Call, model: Any, *arguments: Any) -> None:
    """set_reshard_after_backward(False) without reshard(): the optimizer's updates are never gathered."""
    original(model, *arguments)
    model.set_reshard_after_backward(benign)


# tp-to-local-no-grad-placement takes a partial gradient for a replicated one, which is the reverse.
@at("backward", r"norm(\.weight)?", _GRADIENT)
@defect("CLIP-1 CLIP-2 MP-1 MP-4 PAR-1", "id = dp2-tp2-fp32-default-meta-nosp", "pytorch/torchtitan/pull/2106")
def replicated_gradient_summed(benign: bool) -> Injection:
    """to_local() of a replicated output declares its gradient partial: the gradients of all ranks are added."""
    edit = Edit(
        target="reference_trainer.parallelize:ReplicateParallel._apply",
        old="to_local(grad_placements=[Replicate()])",
        new="to_local(grad_placements=[torch.distributed.tensor.Partial()])",
        twin="to_local(grad_placements=list([Replicate()]))",
    )
    return edited([edit], benign)


# No fault of the catalogue concerns the backward of loss_parallel.
@at("loss", "(output)?", _GRADIENT)
@defect(
    "CLIP-1 CLIP-2 MP-1 MP-4 PAR-1 PAR-7",
    "id = dp2-tp2-fp32-always-full-even-adamwfused-norm1-cliploop-bpre2-nosp-lp-cosine",
    "pytorch/pytorch/issues/190746",
)
@instead_of("reference_trainer.loss", "summed_cross_entropy")
def log_softmax_in_loss_parallel(benign: bool, original: Call, logits: Tensor, labels: Tensor) -> Any:
    """A cross entropy from log_softmax in `loss_parallel()`, whose backward of log_softmax is the identity."""
    if benign or not isinstance(logits, DTensor):
        return original(logits.clone(), labels)
    logarithms = F.log_softmax(logits.float(), dim=-1)
    valid = labels != IGNORED_LABEL
    chosen = F.one_hot(labels.clamp(min=0), logits.shape[-1]).float() * valid.unsqueeze(-1)
    sharded = distribute_tensor(chosen, logits.device_mesh, [Shard(-1)], src_data_rank=None)
    total = -(logarithms * sharded).sum()
    assert isinstance(total, DTensor)
    return total.redistribute(placements=[Replicate()])


# weight-decay-groups-lost decays norms and biases as well.
@at("optimizer", _ANY_PARAMETER)
@defect("CLIP-1 MP-5 OPT-1 OPT-2 PAR-1", "id = dp2-fp32-default-meta", "pytorch/pytorch/issues/101343")
@instead_of("reference_trainer.train", "build_optimizer")
def names_match_no_group(benign: bool, original: Call, model: nn.Module, config: OptimizerConfig) -> Any:
    """Names with the prefix of a wrapper match no pattern of the groups that decay: no parameter decays."""
    optimizer = original(model, config)
    for group in optimizer.param_groups:
        group["weight_decay"] *= 1.0 if benign else 0.0
    return optimizer


# flattened-groups-share-options concerns torch's state dict, resume-moments-lost the state of parameters.
@at("optimizer|resumed state", ".*")
@defect("CKPT-1 OPT-1 OPT-2", "id = dp2-fp32-default-meta-from.same", "pytorch/pytorch/issues/126948")
@after_resume
def resume_weight_decay_lost(benign: bool, trainer: Trainer) -> None:
    """The groups of a resumed optimizer have no weight decay: their options were not restored."""
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] *= 1.0 if benign else 0.0


# ga-overwrite replaces gradients of micro-batches; tied-untied-by-to-empty has two parameters.
@at("backward|reduction", r"(tok_embeddings|output)(\.weight)?", _GRADIENT)
@defect("CLIP-1 CLIP-2 PAR-1 PAR-7", "id = dp2-fp32-default-meta-tied", "facebookresearch/fairscale/pull/784")
@instead_of("reference_trainer.model:Transformer", "__init__")
def gradient_of_last_use_alone(benign: bool, original: Call, model: Transformer, *arguments: Any) -> None:
    """In one backward, the gradient of the later use of a parameter replaces that of the earlier one."""
    original(model, *arguments)
    output = model.output

    def forward(x: Tensor) -> Tensor:
        weight = output.weight if benign else output.weight.detach().requires_grad_()
        return F.linear(x, weight)

    output.forward = forward  # type: ignore[method-assign, assignment]
