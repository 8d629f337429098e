"""Dtype audit: the dtypes that a run really uses, read where they are used."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from reference_trainer.model import Attention, Transformer
from reference_trainer.observer import Observer, Phase

_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
_ATTENTION = "aten::_scaled_dot_product"


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class DtypeAudit(Observer):
    """Collects sets of dtypes, keyed by what they are dtypes of; see `facts` for the keys."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}
        self._phase: Phase = "build"

    def facts(self) -> dict[str, list[str]]:
        """Sorted dtype names for each of: `sharded_parameter`, `unsharded_parameter`, `module_input`, `module_output`,
        `matmul_forward`, `matmul_backward`, `attention_forward`, `attention_backward`, `logits`, `rope_table`,
        `gradient`, `optimizer_state`."""
        return {key: sorted(names) for key, names in sorted(self._seen.items())}

    def phase(self, name: Phase, *, step: int) -> None:
        self._phase = name

    def initialized(self, model: Transformer) -> None:
        self._add("sharded_parameter", *model.parameters())
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.RMSNorm):
                # FSDP2's own pre-forward hook was put first, its post-forward hook has freed the parameters by the time
                # that later hooks run: before forward is where a module's parameters are those that it computes with.
                module.register_forward_pre_hook(self._before_leaf)
                module.register_forward_hook(lambda _module, _inputs, output: self._add("module_output", output))
            elif isinstance(module, Attention):
                module.register_forward_pre_hook(lambda _module, inputs: self._add("rope_table", inputs[1]))
        model.register_forward_hook(lambda _module, _inputs, logits: self._add("logits", logits))

    def gradients(self, model: Transformer, *, step: int) -> None:
        self._add("gradient", *(p.grad for p in model.parameters() if p.grad is not None))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> None:
        """The moments; AdamW's step counters are always fp32 and left out."""
        states = (value for state in optimizer.state.values() for key, value in state.items() if key != "step")
        self._add("optimizer_state", *(value for value in states if isinstance(value, Tensor)))

    def listen(self, func: Any, args: Sequence[Any]) -> None:
        name = func._schema.name
        if self._phase not in ("forward", "backward"):
            return
        if name in _MATMULS:
            self._add(f"matmul_{self._phase}", *(a for a in args if isinstance(a, Tensor)))
        elif name.startswith(_ATTENTION):
            self._add(f"attention_{self._phase}", *(a for a in args[:3] if isinstance(a, Tensor)))

    def _before_leaf(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._add("unsharded_parameter", *module.parameters(recurse=False))
        self._add("module_input", *(x for x in inputs if isinstance(x, Tensor) and x.is_floating_point()))

    def _add(self, key: str, *tensors: Tensor) -> None:
        self._seen.setdefault(key, set()).update(map(dtype_name, tensors))
