"""Faults of FSDP2's sharding: groups that it does not free, and weights that it does not gather again."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from conformance.defects.injection import Defect, replaced_call
from reference_trainer.train import Trainer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"


def reshard_after_forward(*, skip: bool) -> AbstractContextManager[None]:
    """Do not reshard a group after forward, or reshard every group twice, which changes nothing."""

    def reshard(original: Callable[[Any], None], group: Any) -> None:
        if skip and group._training_state.name == "FORWARD":
            return
        original(group)
        if not skip:
            original(group)

    return replaced_call(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "reshard", reshard)


RESHARD_SKIPPED = Defect(
    id="reshard-skipped",
    title="parameters stay unsharded after forward whatever the configuration says",
    source="https://github.com/pytorch/pytorch/issues/149029",
    mechanism="FSDPParamGroup.reshard returns early in forward",
    laws=("RS-1", "MEM-1", "MEM-4", "MEM-7"),
    cells="id in (dp2-fp32-default-meta, dp4-fp32-table-meta-deep, dp4-fp32-default-meta-deep)",
    inject=partial(reshard_after_forward, skip=True),
    inject_twin=partial(reshard_after_forward, skip=False),
)


def before_step(*, evaluate: bool) -> AbstractContextManager[None]:
    """Run the model without gradients between backward and the optimizer's step, or reshard what is sharded already.

    The twin does not evaluate: even if every group is resharded afterwards, torch 2.13 gathers once more in the next
    step.
    """

    def forward_backward(
        original: Callable[..., Tensor], trainer: Trainer, inputs: Tensor, labels: Tensor, **kwargs: int
    ) -> Tensor:
        loss = original(trainer, inputs, labels, **kwargs)
        # Does not belong to the forward and backward that are judged.
        trainer.observer.phase("data", step=kwargs["step"])
        if evaluate:
            with torch.no_grad():
                trainer.model(inputs)
            return loss
        for module in trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return loss

    return replaced_call("reference_trainer.train:Trainer", "_forward_backward", forward_backward)


STALE_UNSHARDED_WEIGHTS = Defect(
    id="stale-unsharded-weights",
    title="forward keeps using weights from before the optimizer's step",
    source="https://github.com/pytorch/pytorch/issues/144289",
    mechanism="an evaluation between backward and step leaves a group unsharded, the step updates only shards",
    laws=("PAR-1", "PAR-4", "RS-1"),
    cells="id in (dp2-fp32-default-meta, dp2-fp32-default-meta-bpre1)",
    inject=partial(before_step, evaluate=True),
    inject_twin=partial(before_step, evaluate=False),
)
