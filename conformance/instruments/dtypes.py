"""Dtype audit: dtypes and kinds of memory of a run's tensors, read where they are used."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from conformance.instruments import accelerators
from conformance.instruments.capture import fingerprint
from conformance.instruments.dispatch_tap import Handler, plain_tensors
from conformance.instruments.sharding import local
from reference_trainer.model import Attention, Block, Transformer
from reference_trainer.observer import Observer, Phase

_AUDITED_PHASES: tuple[Phase, ...] = ("forward", "backward")
_MATMULS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
_ATTENTION = "aten::_scaled_dot_product"
# The second is what log-softmax on logits sharded over the vocabulary (`loss_parallel`) is made of.
_LOG_SOFTMAX = ("aten::_log_softmax", "aten::exp")


class DtypeAudit(Observer):
    """Collector of dtypes and kinds of memory by key; a thing that was never seen has no entry.

    Keys: `initial_parameter/NAME`, `final_parameter/NAME`: sharded parameters; `initial_buffer/NAME`,
    `final_buffer/NAME`;
    `gradient/NAME`: after reduction, and again when the optimizer is about to step;
    `optimizer_state/KEY/NAME`: tensors such as `exp_avg`, not counters;
    in forward, and where activation checkpointing repeats it in backward:
    `unsharded_parameter/NAME`: as its module computes with it, under each of its names if it is tied;
    `module_input/MODULE`, `module_output/MODULE` of linear layers, embedding and norms;
    `block_input/MODULE`, `block_output/MODULE`: without the RoPE table, which is `rope_table/MODULE/PHASE` as each
    attention gets it, PHASE being `forward` or `backward` (recomputation); `logits`; `loss`: operands of log-softmax;
    `matmul/PHASE`, `attention/PHASE`: operands of all such operators, in backward those of gradients too. In forward
    `matmul of kept groups/PHASE` has those of modules that `tell_apart` was told.
    """

    def __init__(self) -> None:
        self._dtypes: dict[str, set[torch.dtype]] = {}
        self._places: dict[str, set[str]] = {}
        self._tables: dict[str, set[str]] = {}
        self._phase: Phase = "build"
        self._model: nn.Module | None = None
        self._calling: list[bool] = []

    def facts(self) -> dict[str, list[str]]:
        """Return the sorted names of dtypes, such as `float32`, by key."""
        return _sorted(
            {key: {str(dtype).removeprefix("torch.") for dtype in dtypes} for key, dtypes in self._dtypes.items()}
        )

    def places(self) -> dict[str, list[str]]:
        """Return the kinds of memory by key: types of devices such as `cuda`, or `cpu pinned` if page-locked."""
        return _sorted(self._places)

    def rope_tables(self) -> dict[str, list[str]]:
        """Return the fingerprints of the RoPE tables that each attention got, by MODULE/PHASE."""
        return _sorted(self._tables)

    def phase(self, name: Phase, *, step: int) -> None:
        """Remember the phase; when the optimizer is about to step, look at the gradients."""
        self._phase = name
        if name == "optimizer" and self._model is not None:
            self.gradients(self._model, step=step)

    def initialized(self, model: nn.Module) -> None:
        """Look at the initial state, and hook the modules."""
        self._model = model
        self._state("initial", model)
        # FSDP2's own pre-forward hook runs first, and its post-forward hook has freed the parameters when later hooks
        # run: only before forward does a module have the parameters that it computes with.
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.RMSNorm):
                module.register_forward_pre_hook(self._hook(module, self._before_leaf, name))
                module.register_forward_hook(self._hook(module, self._after, f"module_output/{name}"))
            elif isinstance(module, Attention):
                module.register_forward_pre_hook(self._hook(module, self._before_attention, name))
            elif isinstance(module, Block):
                module.register_forward_pre_hook(self._hook(module, self._before_block, name))
                module.register_forward_hook(self._hook(module, self._after, f"block_output/{name}"))
        # Other people's models may have `stages` too, such as those of a ConvNeXt.
        if not isinstance(model, Transformer) or not model.stages:
            model.register_forward_hook(self._hook(model, self._after, "logits"))
        elif model.is_last:
            last = model.stages[-1]
            last.register_forward_hook(self._hook(last, self._after, "logits"))

    def tell_apart(self, kept: Mapping[nn.Module, bool]) -> None:
        """Note matrix products apart that modules compute for which `kept` has True.

        A module that `kept` does not have counts like the one that calls it.
        """
        if any(kept.values()):
            for module, is_kept in kept.items():
                module.register_forward_pre_hook(self._hook(module, self._enter, is_kept))
                module.register_forward_hook(self._hook(module, self._leave, is_kept), always_call=True)

    def _enter(self, is_kept: bool, *_unused: Any) -> None:
        self._calling.append(is_kept)

    def _leave(self, *_unused: Any) -> None:
        self._calling.pop()

    def gradients(self, model: nn.Module, *, step: int) -> None:
        """Look at the gradients."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._add(f"gradient/{name}", [parameter.grad])

    def final(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Look at the final state. Call it after the last step."""
        self._state("final", model)
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    self._add(f"optimizer_state/{key}/{name}", [value])

    def listen(self, func: Any) -> Handler | None:
        """Return the handler that looks at the operands of an operator, as a listener of a `DispatchTap`."""
        name = func._schema.name
        if name in _MATMULS:
            return partial(self._operands, "matmul", None)
        if name.startswith(_ATTENTION):
            return partial(self._operands, "attention", 3)
        if name in _LOG_SOFTMAX:
            return self._logits
        return None

    def _operands(self, kind: str, count: int | None, args: Sequence[Any]) -> None:
        if self._phase in _AUDITED_PHASES:
            owner = " of kept groups" if self._phase == "forward" and any(self._calling[-1:]) else ""
            self._add(f"{kind}{owner}/{self._phase}", args[:count])

    def _logits(self, args: Sequence[Any]) -> None:
        if self._phase in _AUDITED_PHASES:
            self._add("loss", args[:1])

    def _hook(self, module: nn.Module, hook: Callable[..., None], key: str | bool) -> Callable[..., None]:
        """Return a module's hook with its key, in forward and backward only.

        While torch.compile traces, the hook does nothing, so that the graph is the same as without it. Beside the hooks
        of FSDP, which break the graph, the hook is not traced.
        """

        def run(*args: Any) -> None:
            if not torch.compiler.is_compiling() and self._phase in _AUDITED_PHASES:
                hook(key, *args)

        if not isinstance(module, FSDPModule):
            return run
        untraced: Callable[..., None] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]
        return untraced

    def _before_leaf(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        for own_name, parameter in module.named_parameters(recurse=False):
            self._add(f"unsharded_parameter/{name}.{own_name}", [parameter])
        self._add(f"module_input/{name}", inputs)

    def _before_attention(self, name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        _, table = inputs
        self._add(f"rope_table/{name}/{self._phase}", [table])
        self._tables.setdefault(f"{name}/{self._phase}", set()).add(fingerprint(table.detach()))

    def _before_block(self, name: str, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._add(f"block_input/{name}", inputs[:1])

    def _after(self, key: str, _module: nn.Module, _inputs: tuple[Any, ...], output: Tensor) -> None:
        self._add(key, [output])

    def _state(self, when: str, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self._add(f"{when}_parameter/{name}", [parameter])
        for name, buffer in model.named_buffers():
            self._add(f"{when}_buffer/{name}", [buffer])

    def _add(self, key: str, tensors: Iterable[Any]) -> None:
        dtypes, places = self._dtypes.setdefault(key, set()), self._places.setdefault(key, set())
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                dtypes.add(next(plain_tensors(tensor)).dtype)  # of float8 numbers, the dtype that they stand for
                places.add(_place(tensor))


def _place(tensor: Tensor) -> str:
    """Return the kind of memory of a tensor, of any shape and dtype, or of this rank's shard of it.

    Only processes that use a device have page-locked memory; others need not call `is_pinned`.
    """
    if tensor.is_cpu and accelerators.is_in_use():
        return "cpu pinned" if local(tensor).is_pinned() else "cpu"
    return tensor.device.type


def _sorted(sets: dict[str, set[str]]) -> dict[str, list[str]]:
    return {key: sorted(names) for key, names in sorted(sets.items())}
