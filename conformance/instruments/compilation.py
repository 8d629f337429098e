"""Compilation: whether a block's forward ran as a compiled graph, or silently in eager mode, and how graphs broke.

The breaks are counted in `torch._dynamo.utils.counters`, which is private; `torch.compiler` has no counter of them.
"""

from typing import Any

import torch
from torch import Tensor, nn

try:
    from torch._dynamo.utils import counters  # DTensor imports torch._dynamo in any case
except ImportError as error:  # pragma: no cover - no supported version lacks it
    raise ImportError(f"torch {torch.__version__} has no torch._dynamo.utils.counters: {error}") from error

from conformance.instruments.facts import CompilationFacts
from reference_trainer.model import Block, Transformer
from reference_trainer.observer import Observer

COMPILED = "CompiledFunctionBackward"
"""Name of the autograd node that AOTAutograd, with any backend, puts behind the outputs of each graph
(torch/_functorch/_aot_autograd/runtime_wrappers.py, `CompiledFunction`)."""


class Compilation(Observer):
    """Counter of the autograd nodes behind the outputs of blocks, by which compiled outputs are recognised.

    Its hooks are not traced, as those of FSDP are not, which stand beside them.
    """

    def __init__(self) -> None:
        self._breaks_before = _graph_breaks()
        # Each graph has a separate class: autograd makes a class for each torch.autograd.Function that is defined.
        self._nodes: list[type | None] = []

    def initialized(self, model: Transformer) -> None:
        """Hook the forward of each block."""
        for module in model.modules():
            if isinstance(module, Block):
                module.register_forward_hook(torch.compiler.disable(self._after_block))  # type: ignore[no-untyped-call]

    def facts(self) -> CompilationFacts:
        """Return the numbers of compiled and of eager forward passes of blocks."""
        compiled = [node for node in self._nodes if node is not None and node.__name__ == COMPILED]
        return CompilationFacts(
            graphs=len(set(compiled)),
            compiled=len(compiled),
            eager=len(self._nodes) - len(compiled),
            breaks=_graph_breaks() - self._breaks_before,
        )

    def _after_block(self, _block: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        self._nodes.append(type(output.grad_fn) if output.grad_fn is not None else None)


def _graph_breaks() -> int:
    """Return the number of breaks in this process so far."""
    return sum(counters["graph_break"].values())
