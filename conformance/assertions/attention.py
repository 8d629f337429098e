"""Attention as the device of a run computes it: one operator, or products and a softmax where the device has none.

The choice depends on the device, the dtype and the size of heads, and is observed in one process, on the device of the
oracles.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.dtypes import DtypeAudit
from conformance.instruments.operators import OperatorCount
from conformance.numerics.device_operators import chosen_as_on, kernel_device
from conformance.numerics.knobs import pinned_numerics
from conformance.oracles.dtype_policy import dtype_policy
from conformance.run.record import Record
from reference_trainer.config import TrainerConfig
from reference_trainer.model import ARITHMETIC, rope_table
from reference_trainer.observer import Phase

_FUSED = "scaled_dot_product"
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


@dataclass(frozen=True)
class Attention:
    """Operators of one attention."""

    operators: Mapping[str, Mapping[str, int]]
    """Number of calls by phase and operator."""
    dtypes: Mapping[str, list[str]]
    """Dtypes of operands of products and of attention by the keys of `instruments.dtypes.DtypeAudit`."""

    @property
    def is_fused(self) -> bool:
        """True if attention is one operator."""
        return any(_FUSED in name for name in self.operators["forward"])

    def calls(self, operators: Mapping[str, int]) -> int:
        """Return the number of attentions among operators, without their gradients."""
        return sum(number for name, number in operators.items() if self._is_core(name))

    def _is_core(self, name: str) -> bool:
        if self.is_fused:
            return _FUSED in name and "backward" not in name
        return name in self.operators["forward"] and "softmax" in name

    def products(self, phase: Phase) -> int:
        """Return the number of matrix products of one attention."""
        return products(self.operators[phase])


def products(operators: Mapping[str, int]) -> int:
    """Return the number of matrix products among operators."""
    return sum(operators.get(name, 0) for name in _PRODUCTS)


def attention_of(record: Record) -> Attention:
    """Return the attention of a run's model, in forward and backward."""
    config, kernels = record.config, kernel_device(record.device_type)
    dtype: torch.dtype = getattr(torch, dtype_policy(config.precision).compute)
    count, audit = OperatorCount(), DtypeAudit()
    choice = chosen_as_on(record.device_type, dtype, head_dim=config.model.head_dim)
    with pinned_numerics(kernels), choice, DispatchTap([count.listen, audit.listen]):
        _attend(config, dtype, kernels, count, audit)
    operands = {thing: dtypes for thing, dtypes in audit.facts().items() if thing.startswith(("matmul/", "attention/"))}
    return Attention(count.facts(), operands)


def _attend(config: TrainerConfig, dtype: torch.dtype, device: str, *observers: OperatorCount | DtypeAudit) -> None:
    """Compute one attention and its gradients, and report the phases to observers."""

    def begin(phase: Phase) -> None:
        for observer in observers:
            observer.phase(phase, step=0)

    q, k, v = _operands(config, dtype, device)
    table = rope_table(config.model, device=device)
    begin("forward")
    out = ARITHMETIC[config.model.arithmetic].attend(q, k, v, table)
    begin("backward")
    torch.autograd.backward(out, torch.ones_like(out))


def _operands(config: TrainerConfig, dtype: torch.dtype, device: str) -> Iterator[Tensor]:
    """Yield queries, keys and values of one sample, as the model has them."""
    model = config.model
    for heads in (model.n_heads, model.n_kv_heads, model.n_kv_heads):
        shape = (1, config.data.seq_len, heads, model.head_dim)
        yield torch.ones(shape, dtype=dtype, device=device, requires_grad=True)
