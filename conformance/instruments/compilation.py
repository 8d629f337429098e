"""Compilation: whether a block's forward really ran as a compiled graph, or silently in eager mode."""

from typing import Any

from torch import Tensor, nn

from conformance.instruments.facts import CompilationFacts
from reference_trainer.model import Block, Transformer
from reference_trainer.observer import Observer

COMPILED = "CompiledFunctionBackward"
"""Name of the autograd node that AOTAutograd, with whatever backend, puts behind the outputs of each graph
(torch/_functorch/_aot_autograd/runtime_wrappers.py, `CompiledFunction`)."""


class Compilation(Observer):
    """Looks at the autograd node behind each block's output, which tells what has computed it."""

    def __init__(self) -> None:
        # A class of its own for each graph: autograd makes one for each torch.autograd.Function that is defined.
        self._nodes: list[type | None] = []

    def initialized(self, model: Transformer) -> None:
        for module in model.modules():
            if isinstance(module, Block):
                module.register_forward_hook(self._after_block)

    def facts(self) -> CompilationFacts:
        compiled = [node for node in self._nodes if node is not None and node.__name__ == COMPILED]
        return CompilationFacts(
            graphs=len(set(compiled)), compiled=len(compiled), eager=len(self._nodes) - len(compiled)
        )

    def _after_block(self, _block: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        self._nodes.append(type(output.grad_fn) if output.grad_fn is not None else None)
