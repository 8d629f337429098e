"""Faults of float8 training: stale scales, or those of a shard, layers that are left out, copies that are kept."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from conformance.defects.injection import Call, defect, instead_of
from reference_trainer.train import Trainer

_TENSORWISE = "id = dp2-bf16mp-float8tensorwise-default-meta"
_ROWWISE = "id = dp2-bf16mp-float8rowwise-default-meta"
_RESUMED = "id = dp2-bf16mp-float8tensorwise-default-meta-from.same"
_MEMORY = "id = dp4-bf16mp-float8tensorwise-default-meta-deep"
_PRECOMPUTING = "meta-pytorch/float8_experimental/pull/266"
_LARGEST = torch.finfo(torch.float8_e4m3fn).max


@defect("PAR-2 MP-4", _TENSORWISE, _PRECOMPUTING, since="2.10")
@instead_of("reference_trainer.train", "precompute_scales")
def stale_float8_scale(benign: bool, original: Call, model: nn.Module) -> None:
    """Scales of weights that are gathered in float8 are those of the initial weights in every step."""
    if benign or any(scale is None for scale in _scales(model)):
        original(model)


@defect("PAR-2", _TENSORWISE, _PRECOMPUTING, since="2.10")
@instead_of("reference_trainer.train", "precompute_scales")
def float8_scale_a_step_behind(benign: bool, original: Call, model: nn.Module) -> None:
    """Scales of weights that are gathered in float8 are computed after each step, and are used a step later."""
    before = _scales(model)
    original(model)
    if not benign and None not in before:
        later = getattr(model, "later_scales", before)
        model.later_scales = _scales(model)  # type: ignore[assignment]
        _set_scales(model, later)


@defect("PAR-2 MP-4", _TENSORWISE, "meta-pytorch/float8_experimental/issues/201", since="2.10")
@instead_of("reference_trainer.train", "precompute_scales")
def float8_scale_of_own_shard(benign: bool, original: Call, model: nn.Module) -> None:
    """Each rank scales its shard of a weight by the largest value of that shard."""
    if benign:
        original(model)
    else:
        _set_scales(model, [_LARGEST / shard.detach().abs().max().float() for shard in _shards(model)])


@defect("CKPT-1", _RESUMED, _PRECOMPUTING, since="2.10")
@instead_of("reference_trainer.checkpoint", "_restore")
def float8_scale_stale_after_loading(benign: bool, original: Call, trainer: Trainer, state: dict[str, Any]) -> None:
    """A run that has loaded a checkpoint gathers its weights by the scales of the initial weights."""
    if benign:
        original(trainer, state)
    else:
        with patch.object(trainer, "update_scales", lambda: None):
            original(trainer, state)


@defect("PAR-2 MP-1 AXIS-1", _TENSORWISE, "pytorch/torchtitan/pull/1391", since="2.10")
@instead_of("reference_trainer.float8", "fits")
def float8_filter_takes_no_layer(benign: bool, original: Call, module: nn.Module) -> bool:
    """The filter of layers that are worth float8 leaves out all layers of a small model."""
    is_large = isinstance(module, nn.Linear) and module.weight.numel() > 2**20
    return bool(original(module)) and (benign or is_large)


@defect("PAR-2", _ROWWISE, "pytorch/ao/pull/835", since="2.10")
@instead_of("torchao.float8.float8_utils", "_round_scale_down_to_power_of_2")
def float8_scales_not_rounded(benign: bool, original: Call, scale: Tensor) -> Tensor:
    """Scales of rows are not rounded down to powers of two, as the recipe promises."""
    rounded: Tensor = original(scale)
    return rounded if benign else scale


@defect("MEM-1", _MEMORY, "pytorch/pytorch/pull/194114", since="2.10")
@instead_of("torchao.float8.fsdp_utils:WeightWithDynamicFloat8CastTensor", "fsdp_post_all_gather")
def copy_of_float8_kept(
    benign: bool, original: Call, shard: Any, gathered: tuple[Tensor, ...], scale: Any, dtype: torch.dtype, **out: Any
) -> Any:
    """A weight that was gathered in float8 keeps a copy in bf16 until it is gathered again."""
    copy = gathered[0].to(torch.bfloat16)
    if not benign:
        shard.copy_of_gathered = copy
    return original(shard, gathered, scale, dtype, **out)


def _shards(model: nn.Module) -> list[Any]:
    """Return a rank's shards of the weights that are gathered in float8, as FSDP has them; `to_local` returns views."""
    shards = [getattr(parameter, "_local_tensor", None) for parameter in model.parameters()]
    return [shard for shard in shards if hasattr(shard, "fsdp_pre_all_gather")]


def _scales(model: nn.Module) -> list[Tensor | None]:
    return [shard._precomputed_scale for shard in _shards(model)]


def _set_scales(model: nn.Module, scales: list[Any]) -> None:
    for shard, scale in zip(_shards(model), scales, strict=True):
        shard._precomputed_scale = scale
