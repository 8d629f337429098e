"""Tensors and fingerprints of a run: initial state, step-0 gradients before clipping, final state."""

import hashlib

import torch
from torch import Tensor

from conformance.instruments.sharding import full
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer


def fingerprint(tensor: Tensor) -> str:
    """Digest of shape, dtype and every bit of a tensor."""
    header = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    content = tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    return hashlib.sha256(header + content).hexdigest()[:16]


class Capture(Observer):
    """Full tensors by the key `WHEN/KIND/NAME` (rank 0 keeps them), and their fingerprints as this rank sees them.

    WHEN is `initial`, `step0` or `final`; KIND is `parameter`, `buffer`, `gradient` or a key of the optimizer state
    such as `exp_avg`. A rank's full tensor is gathered within its own replica: replicas that differ show it.
    """

    def __init__(self, *, keep_tensors: bool) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.fingerprints: dict[str, str] = {}
        self.batches: list[dict[str, str]] = []
        """Of each step, digests of this rank's `inputs` and `labels`."""
        self._keep_tensors = keep_tensors

    def batch(self, micro_batches: list[tuple[Tensor, Tensor]], *, step: int) -> None:
        inputs, labels = (torch.cat(tensors) for tensors in zip(*micro_batches, strict=True))
        self.batches.append({"inputs": fingerprint(inputs), "labels": fingerprint(labels)})

    def initialized(self, model: Transformer) -> None:
        self._state("initial", model)

    def gradients(self, model: Transformer, *, step: int) -> None:
        if step == 0:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    self._add(f"step0/gradient/{name}", parameter.grad)

    def final(self, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
        """To be called after the last step."""
        self._state("final", model)
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    self._add(f"final/{key}/{name}", value)

    def _state(self, when: str, model: Transformer) -> None:
        for name, parameter in model.named_parameters():
            self._add(f"{when}/parameter/{name}", parameter)
        for name, buffer in model.named_buffers():
            self._add(f"{when}/buffer/{name}", buffer)

    def _add(self, key: str, tensor: Tensor) -> None:
        whole = full(tensor)
        self.fingerprints[key] = fingerprint(whole)
        if self._keep_tensors:
            self.tensors[key] = whole.cpu().clone().contiguous()
