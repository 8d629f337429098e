"""RoPE table without values: `to_empty` gives new memory to buffers, too, which no `reset_parameters` fills."""

import torch
from torch import nn

from benchmarks.located.mistakes.trainer import Llama, Trainer, rope_table


class Wrong(Trainer):
    """Trainer with the mistake."""

    def materialise(self, model: Llama, device: torch.device) -> None:
        """Give memory to the model, and values to its parameters."""
        model.to_empty(device=device)  # mistake: rope-uninitialised
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm)):
                module.reset_parameters()


class Right(Trainer):
    """Trainer without it."""

    def materialise(self, model: Llama, device: torch.device) -> None:
        """Give memory to the model, and values to its parameters and a new RoPE table."""
        model.to_empty(device=device)
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding, nn.RMSNorm)):
                module.reset_parameters()
        model.register_buffer("rope_table", rope_table(), persistent=False)
