"""Layer that no call of `fully_shard` reaches: its weights stay replicated, and its gradients are not reduced."""

from typing import Any

from torch.distributed.fsdp import fully_shard

from benchmarks.located.mistakes.trainer import Llama, Trainer


class Wrong(Trainer):
    """Trainer with the mistake."""

    def shard(self, model: Llama, options: dict[str, Any]) -> None:
        """Shard modules one by one, without a root."""
        for module in (model.embedding, *model.layers[1:], model.norm, model.head):  # mistake: layer-not-wrapped
            fully_shard(module, **options)  # mistake: layer-not-wrapped


class Right(Trainer):
    """Trainer without it."""

    def shard(self, model: Llama, options: dict[str, Any]) -> None:
        """Shard modules one by one, without a root."""
        for module in (model.embedding, *model.layers, model.norm, model.head):
            fully_shard(module, **options)
