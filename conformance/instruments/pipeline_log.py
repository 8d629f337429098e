"""Log of a pipeline: the actions of its stages in order, the activations alive at each, and the transfers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from conformance.instruments.collectives import TRANSFERS
from conformance.instruments.dispatch_tap import Handler
from conformance.instruments.facts import StageActionFacts, Transfer
from reference_trainer.model import Block, Transformer
from reference_trainer.observer import Observer, Phase, StageAction

_HELD = "_conformance_activation"
"""Attribute of a storage, which torch keeps as long as the storage lives."""


class PipelineLog(Observer):
    """Listener of the dispatch tap that writes down the actions of stages, and transfers between ranks.

    `collectives` returns the number of collectives so far. Leaves `stage_actions` and `transfers` of `facts.RankFacts`.
    """

    def __init__(self, collectives: Callable[[], int]) -> None:
        self.actions: list[StageActionFacts] = []
        self.transfers: list[Transfer] = []
        self._collectives = collectives
        self._alive: dict[tuple[int, int], int] = {}
        """Number of activations alive, by stage and micro-batch."""
        self._step = -1
        self._now = (-1, -1)
        """Stage and micro-batch of the last action."""

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the step."""
        self._step = step

    def initialized(self, model: Transformer) -> None:
        """Hook modules of each stage whose outputs are activations that backward needs.

        They are the inputs of the last linear layers and, since activation checkpointing recomputes these, the outputs
        of layers. The output of a stage is no such activation: its send keeps it.
        """
        for stage in model.stages:
            *inner, last = (cast("Block", layer) for layer in stage.layers.values())
            for layer in inner:
                layer.register_forward_hook(lambda _module, _inputs, output: self._follow(output))
            for layer in (*inner, last):
                layer.feed_forward.w2.register_forward_pre_hook(lambda _module, inputs: self._follow(inputs[0]))

    def stage_action(self, action: StageAction, *, stage: int, micro_batch: int, step: int) -> None:
        """Write down an action, and the micro-batches with activations alive when it begins."""
        held = sorted(micro_batch for (owner, micro_batch), number in self._alive.items() if owner == stage and number)
        self.actions.append(StageActionFacts(step, action, stage, micro_batch, held, self._collectives()))
        self._now = stage, micro_batch

    def listen(self, func: Any) -> Handler | None:
        """Return the handler that writes down the calls of an operator that transfers a tensor to or from a rank."""
        if func._schema.name not in TRANSFERS:
            return None
        names = [argument.name for argument in func._schema.arguments]
        return partial(self._transferred, *TRANSFERS[func._schema.name], names)

    def _transferred(self, direction: str, peer: str, names: Sequence[str], args: Sequence[Any]) -> None:
        arguments: Mapping[str, Any] = dict(zip(names, args, strict=False))
        for tensor in arguments["tensors"]:
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.transfers.append(Transfer(self._step, direction, arguments[peer], tensor.numel(), dtype))

    def _follow(self, activation: Tensor) -> None:
        if torch.compiler.is_compiling():  # the graph must be the same as without the hook
            return
        shard = activation.to_local() if isinstance(activation, DTensor) else activation
        setattr(shard.untyped_storage(), _HELD, _Held(self._alive, self._now))


class _Held:
    """Count of one activation, referenced by its storage alone, with which it ends."""

    def __init__(self, alive: dict[tuple[int, int], int], key: tuple[int, int]) -> None:
        self._alive, self._key = alive, key
        alive[key] = alive.get(key, 0) + 1

    def __del__(self) -> None:
        self._alive[self._key] -= 1
