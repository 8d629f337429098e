"""Compilation of blocks: whether a block's forward ran as a compiled graph, or silently in eager mode."""

from typing import Any

from torch import Tensor, nn

from conformance.instruments.facts import CompilationFacts
from reference_trainer.model import Block, Transformer
from reference_trainer.observer import Observer

COMPILED = "CompiledFunctionBackward"
"""Name of the autograd node that AOTAutograd, with any backend, puts behind the outputs of each graph
(torch/_functorch/_aot_autograd/runtime_wrappers.py, `CompiledFunction`)."""


class Compilation(Observer):
    """Counter of the autograd nodes behind the outputs of blocks, by which compiled outputs are recognised."""

    def __init__(self) -> None:
        # Each graph has a separate class: autograd makes a class for each torch.autograd.Function that is defined.
        self._nodes: list[type | None] = []

    def initialized(self, model: Transformer) -> None:
        """Hook the forward of each block."""
        for module in model.modules():
            if isinstance(module, Block):
                module.register_forward_hook(self._after_block)

    def facts(self) -> CompilationFacts:
        """Return the numbers of compiled and of eager forward passes of blocks."""
        compiled = [node for node in self._nodes if node is not None and node.__name__ == COMPILED]
        return CompilationFacts(
            graphs=len(set(compiled)), compiled=len(compiled), eager=len(self._nodes) - len(compiled)
        )

    def _after_block(self, _block: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        self._nodes.append(type(output.grad_fn) if output.grad_fn is not None else None)
