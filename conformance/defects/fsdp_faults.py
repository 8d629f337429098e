"""Faults of FSDP2: what it gathers and frees."""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from conformance.defects.injection import Defect, replaced
from reference_trainer.train import Trainer

_FULLY_SHARD = "torch.distributed.fsdp._fully_shard"


def reshard(*, skip_in_forward: bool) -> AbstractContextManager[None]:
    """Do not free a group after forward, or (which changes nothing) free it twice."""

    def make(original: Any) -> Any:
        def wrapped(group: Any) -> None:
            if skip_in_forward and group._training_state.name == "FORWARD":
                return
            original(group)
            if not skip_in_forward:
                original(group)

        return wrapped

    return replaced(f"{_FULLY_SHARD}._fsdp_param_group:FSDPParamGroup", "reshard", make)


def before_step(*, evaluate: bool) -> AbstractContextManager[None]:
    """Between backward and the optimizer's step run the model without gradients, or free what is free already.

    The twin does not evaluate: even if all is freed afterwards, torch 2.13 gathers once more in the next step.
    """

    def make(original: Any) -> Any:
        def forward_backward(trainer: Trainer, inputs: Tensor, labels: Tensor, **kwargs: int) -> Tensor:
            loss: Tensor = original(trainer, inputs, labels, **kwargs)
            # Not part of the forward and backward that are judged.
            trainer.observer.phase("data", step=kwargs["step"])
            if evaluate:
                with torch.no_grad():
                    trainer.model(inputs)
                return loss
            for module in trainer.model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
            return loss

        return forward_backward

    return replaced("reference_trainer.train:Trainer", "_forward_backward", make)


DEFECTS: tuple[Defect, ...] = (
    Defect(
        id="reshard-skipped",
        title="parameters stay unsharded after forward whatever was asked for",
        source="https://github.com/pytorch/pytorch/issues/149029",
        mechanism="FSDPParamGroup.reshard returns early in forward",
        laws=("RS-1", "MEM-1", "MEM-4", "MEM-7"),
        inject=partial(reshard, skip_in_forward=True),
        inject_twin=partial(reshard, skip_in_forward=False),
    ),
    Defect(
        id="stale-unsharded-weights",
        title="forward keeps using weights from before the optimizer's step",
        source="https://github.com/pytorch/pytorch/issues/144289",
        mechanism="an evaluation between backward and step leaves a group unsharded, the step updates only shards",
        laws=("PAR-1", "PAR-4", "RS-1"),
        inject=partial(before_step, evaluate=True),
        inject_twin=partial(before_step, evaluate=False),
    ),
)
