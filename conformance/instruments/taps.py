"""Taps: the tensors of a run at the borders of all modules, forward and backward, in the order of execution.

The same taps are put on the ranks of a run and on the oracle in one process, whose tensors are full; a place is one if
module, kind, item and number of the call are equal. No operator is added to the graph of autograd: inputs are those
that the caller passes, outputs those that the caller gets, and gradients are read by hooks of these tensors, so that
the sum of the gradients of all consumers is the same in the oracle. Sources: `torch.nn.Module.register_forward_hook`,
`torch.Tensor.register_hook`.
"""

import contextlib
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeGuard

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from conformance.instruments.collectives import NAMESPACES, collective_kind
from conformance.instruments.dispatch_tap import Handler, OutcomeHandler, plain
from conformance.instruments.issuers import issuing_group, issuing_module
from conformance.instruments.tensor_file import write_tensors
from conformance.project import PROJECT
from reference_trainer.observer import Observer, Phase, StageAction

Kind = Literal[
    "input",
    "output",
    "output gradient",
    "input gradient",
    "parameter",
    "parameter in backward",
    "parameter gradient",
    "collective input",
    "collective output",
]
"""Kind of a tapped tensor.

The gradient of a parameter is that of one micro-batch on one rank, before any reduction. Collectives are those of
DTensor and other functional ones, whose results are waited for by an operator; the call of a collective is its number
in the log of collectives.
"""
COLLECTIVE = ("collective input", "collective output")
PARTIAL = "partial"
"""Placement of a tensor of which each rank of a mesh dimension has a term."""
REPLICATED = "replicated"


class Line(NamedTuple):
    """Line of source: file, number and function."""

    file: str
    number: int
    function: str


class Tap(msgspec.Struct, frozen=True, kw_only=True):
    """Tensor at one place of a run."""

    module: str
    """Path of the module in the model; empty for the model itself."""
    kind: Kind
    item: str
    """Name of a parameter, or the position of an input or output; keyword arguments have their names."""
    call: int
    """Number of calls of the module in the same step before this one: the micro-batch, if there is one call in each."""
    step: int
    is_recomputed: bool = False
    """True in a forward pass that backward repeats."""
    dtype: str
    shape: list[int]
    """Shape of the tensor on this rank."""
    placements: dict[str, str | int] | None
    """By mesh dimension the sharded dimension, `replicated` or `partial`; None for a plain tensor."""
    collectives: int
    """Number of collectives that this rank had issued before."""
    called: int
    """Index of the line that called the module, see `Taps.lines`."""
    computed: int = -1
    """Index of the line that executed the last operator of the forward pass before; -1 if none is known."""
    value: int
    """Number of the tensor object in forward: that of a gradient is the number of the tensor whose gradient it is."""

    @property
    def place(self) -> tuple[int, str, str, str, int, bool]:
        """Place of the tensor, which a run and its oracle have in common."""
        return self.step, self.module, self.kind, self.item, self.call, self.is_recomputed


class Number(NamedTuple):
    """Single number that a line of the trainer has computed."""

    line: int
    value: float


class OtherCall(NamedTuple):
    """Call of the model outside of the forward and backward phases, as of an evaluation."""

    step: int
    phase: str
    collectives: int
    """Number of collectives that this rank had issued before."""
    line: int


class TapFile(msgspec.Struct, frozen=True, kw_only=True):
    """Taps of one process without their tensors; fields as of `Taps`."""

    taps: list[Tap]
    lines: list[Line]
    issued: list[int]
    issuers: list[str]
    scalars: dict[str, list[int]]
    numbers: dict[str, list[Number]]
    own_lines: dict[str, list[int]]
    other_calls: list[OtherCall]
    modules: dict[str, str]


class Taps(Observer):
    """Taps of one process: `taps`, and for each of these its tensor, on the CPU, in `tensors`.

    `named` gives the path in the model of one process from that in the model, where a wrapper may have the path of the
    module that it wraps, and the latter counts; modules below one that `is_opaque` are left alone, such as those of a
    compiled graph. Inside of `quietly` no other instrument sees operators.
    """

    def __init__(
        self,
        *,
        named: Callable[[str], str] = str,
        is_opaque: Callable[[nn.Module], bool] | None = None,
        quietly: Callable[[], AbstractContextManager[object]] = nullcontext,
        count_collectives: Callable[[], int] = int,
    ) -> None:
        self.taps: list[Tap] = []
        self.tensors: list[Tensor] = []
        self.lines: list[Line] = []
        self.issued: list[int] = []
        """Index of the line that issued each collective, in the order of the log of collectives."""
        self.issuers: list[str] = []
        """Modules of the group of FSDP for which each collective was issued, else the module in forward, or nothing."""
        self.scalars: dict[str, list[int]] = {}
        """Lines of the trainer that computed single numbers, clipped or updated, by `STEP PHASE`."""
        self.numbers: dict[str, list[Number]] = {}
        """Single numbers in the order in which they were computed, by `STEP PHASE`."""
        self.own_lines: dict[str, list[int]] = {}
        """Lines that executed operators in the forward of a module and not in that of a module inside of it, each once,
        by `STEP MODULE`."""
        self.other_calls: list[OtherCall] = []
        self.modules: dict[str, str] = {}
        """Class by path of all tapped modules, in the order of the model."""
        self.step, self._phase = -1, "forward"
        self._named, self._is_opaque, self._quietly = named, is_opaque or is_compiled, quietly
        self._count_collectives = count_collectives
        self._micro_batch = -1
        self._calls: Counter[tuple[int, str]] = Counter()
        self._first_calls: dict[tuple[int, str, int], int] = {}
        """Number of a module's first call in each micro-batch of a step."""
        self._repeated: Counter[tuple[int, str, int]] = Counter()
        self._gradients: Counter[tuple[int, str]] = Counter()
        self._index: dict[Line, int] = {}
        self._paths: dict[int, str] = {}
        self._handles: list[Any] = []
        self._hooked: dict[int, nn.Parameter] = {}
        self._current: dict[str, tuple[int, bool, int]] = {}
        self._inside: list[str] = []
        self._computed = -1
        self._in_flight: dict[int, int] = {}
        self._numbers: dict[int, tuple[int, weakref.ref[Tensor]]] = {}

    def phase(self, name: Phase, *, step: int) -> None:
        """Take the phase that begins: modules are tapped in `forward` and `backward`."""
        if name == "forward":
            self._micro_batch = self._micro_batch + 1 if self.step == step and self._phase != "data" else 0
        self._phase, self.step = name, step
        self._inside.clear()
        self._computed = -1

    def stage_action(self, action: StageAction, *, stage: int, micro_batch: int, step: int) -> None:
        """Take the micro-batch of a pipeline's stage."""
        self._micro_batch = micro_batch

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Open a context in which the modules of a model are tapped."""
        self.attach(model)
        try:
            yield
        finally:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()

    def initialized(self, model: nn.Module) -> None:
        """Tap the modules of a model that has its final modules and placements."""
        self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Tap the modules of a model."""
        opaque: list[str] = []
        tapped: dict[str, tuple[str, nn.Module]] = {}
        for path, module in model.named_modules():
            if any(path.startswith(f"{above}.") for above in opaque):
                continue
            if self._is_opaque(module):
                opaque.append(path)
            tapped[self._named(path)] = path, module
        for name, (path, module) in tapped.items():
            self._paths[id(module)] = name
            self.modules.setdefault(name, type(module).__name__)
            parameters = module.named_parameters if path in opaque else partial(module.named_parameters, recurse=False)
            self._handles += [
                module.register_forward_pre_hook(partial(self._enter, name), prepend=True, with_kwargs=True),
                module.register_forward_pre_hook(partial(self._compute, name, parameters, self._below(path, module))),
                module.register_forward_hook(self._return, prepend=True),
                module.register_forward_hook(partial(self._leave, name, parameters)),
            ]

    def listen(self, func: Any) -> Handler | None:
        """Return the handler that notes the line which issues a collective; to be a listener of a `DispatchTap`."""
        if func.namespace not in NAMESPACES or collective_kind(func._schema.name) is None:
            return None
        return self._issue

    def listen_to_outcomes(self, func: Any) -> OutcomeHandler | None:
        """Return the handler that notes lines that execute operators, or keeps the tensors of a collective."""
        if func.namespace == "_c10d_functional":
            return self._wait if "wait_tensor" in func._schema.name else self._communicate
        return self._execute if func.namespace == "aten" else None

    def _communicate(self, args: Sequence[Any], _kwargs: Any, result: Any) -> None:
        if isinstance(result, Tensor) and self._phase in ("forward", "backward"):
            number = self._count_collectives() - 1
            self._add("", "collective input", "", args[0], number, False, -1)
            self._in_flight[id(result)] = number

    def _wait(self, args: Sequence[Any], _kwargs: Any, _result: Any) -> None:
        number = self._in_flight.pop(id(args[0]), None)
        if number is not None:
            self._add("", "collective output", "", args[0], number, False, -1)

    def write(self, directory: Path, *, rank: int) -> None:
        """Write taps and tensors of a rank, which `read_taps` reads."""
        content = TapFile(
            taps=self.taps,
            lines=self.lines,
            issued=self.issued,
            issuers=self.issuers,
            scalars=self.scalars,
            numbers=self.numbers,
            own_lines=self.own_lines,
            other_calls=self.other_calls,
            modules=self.modules,
        )
        (directory / f"taps{rank}.msgpack").write_bytes(msgspec.msgpack.encode(content))
        write_tensors(
            directory / f"taps{rank}.safetensors",
            dict(zip(map(str, range(len(self.tensors))), self.tensors, strict=True)),
        )

    def _issue(self, _arguments: Sequence[Any]) -> None:
        self.issued.append(self._line(_innermost))
        frame = sys._getframe(1)
        module = issuing_module(frame)
        self.issuers.append(issuing_group(frame) or self._paths.get(id(module), ""))

    def _execute(self, _args: Sequence[Any], _kwargs: Any, result: Any) -> None:
        number = _number(result)
        is_told = self._phase in ("clip", "optimizer", "unscale") or number is not None
        if self._phase != "forward" and not is_told:
            return
        line, when = self._line(owner), f"{self.step} {self._phase}"
        if self._phase == "forward":
            self._computed = line
            own = self.own_lines.setdefault(f"{self.step} {self._inside[-1]}", []) if self._inside else []
            if line not in own:
                own.append(line)
        if number is not None and number.device.type in _READABLE:
            self.numbers.setdefault(when, []).append(Number(line, float(number.detach())))
        if is_told:
            lines = self.scalars.setdefault(when, [])
            if not lines or lines[-1] != line:
                lines.append(line)

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._phase not in ("forward", "backward"):
            self._current.pop(name, None)
            if not name:
                called = self._line(owner)
                self.other_calls.append(OtherCall(self.step, self._phase, self._count_collectives(), called))
            return
        is_recomputed = self._phase == "backward"
        call = self._repeated_call(name) if is_recomputed else self._next_call(name)
        self._current[name] = call, is_recomputed, self._line(owner)
        for item, value in [*((str(i), v) for i, v in enumerate(args)), *kwargs.items()]:
            self._tap_with_gradient(name, "input", item, value)

    def _next_call(self, name: str) -> int:
        call = self._calls[self.step, name]
        self._calls[self.step, name] += 1
        self._first_calls.setdefault((self.step, name, self._micro_batch), call)
        return call

    def _repeated_call(self, name: str) -> int:
        """Return the number of the call that backward repeats, in which it may leave out the last ones of a block."""
        key = self.step, name, self._micro_batch
        self._repeated[key] += 1
        return self._first_calls.get(key, 0) + self._repeated[key] - 1

    def _below(self, path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return the modules below one that FSDP2 shards whose parameters it gathers, with their names.

        A trainer may use the parameters of such a module and never call it.
        """
        if not isinstance(module, FSDPModule):
            return []
        inside = {
            below: each
            for below, each in module.named_modules(prefix=path, remove_duplicate=True)
            if each is not module and not _is_sharded_between(module, path, below)
        }
        return [(self._named(below), each) for below, each in inside.items()]

    def _compute(
        self,
        name: str,
        parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]],
        below: Sequence[tuple[str, nn.Module]],
        *_unused: Any,
    ) -> None:
        if self._phase == "forward":
            self._inside.append(name)
        if name not in self._current:
            return
        for item, parameter in parameters():
            self._add(name, "parameter", item, parameter, *self._current[name])
            self._hook_gradient(name, item, parameter)
        for other, module in below:
            for item, parameter in module.named_parameters(recurse=False):
                self._hook_gradient(other, item, parameter)

    def _hook_gradient(self, name: str, item: str, parameter: nn.Parameter) -> None:
        if parameter.requires_grad and id(parameter) not in self._hooked:
            self._hooked[id(parameter)] = parameter  # kept, so that no other object gets its id
            self._handles.append(_hook(parameter, partial(self._parameter_gradient, name, item)))

    def _return(self, *_unused: Any) -> None:
        if self._phase == "forward" and self._inside:
            self._inside.pop()

    def _leave(
        self,
        name: str,
        parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]],
        _module: nn.Module,
        _args: tuple[Any, ...],
        output: Any,
    ) -> None:
        if name not in self._current:
            return
        outputs = output if isinstance(output, tuple | list) else (output,)
        for item, value in enumerate(outputs):
            self._tap_with_gradient(name, "output", str(item), value, parameters=parameters)

    def _tap_with_gradient(
        self,
        name: str,
        kind: Literal["input", "output"],
        item: str,
        value: Any,
        *,
        parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]] | None = None,
    ) -> None:
        if not isinstance(value, Tensor):
            return
        call, is_recomputed, called = self._current[name]
        number = self._number(value)
        self._add(name, kind, item, value, call, is_recomputed, called, number, computed=self._computed)
        if value.requires_grad and torch.is_grad_enabled() and not is_recomputed:
            _hook(value, partial(self._gradient, name, kind, item, call, called, number, parameters))

    def _gradient(
        self,
        name: str,
        kind: Literal["input", "output"],
        item: str,
        call: int,
        called: int,
        number: int,
        parameters: Callable[[], Iterator[tuple[str, nn.Parameter]]] | None,
        gradient: Tensor,
    ) -> None:
        gradient_kind: Kind = "input gradient" if kind == "input" else "output gradient"
        self._add(name, gradient_kind, item, gradient, call, False, called, number)
        for parameter_name, parameter in parameters() if parameters else ():
            self._add(name, "parameter in backward", parameter_name, parameter, call, False, called)

    def _parameter_gradient(self, name: str, item: str, gradient: Tensor) -> None:
        key = self.step, f"{name}.{item}"
        call = self._gradients[key]
        self._gradients[key] += 1
        _, _, called = self._current.get(name, (0, False, 0))
        self._add(name, "parameter gradient", item, gradient, call, False, called)

    def _number(self, tensor: Tensor) -> int:
        """Return a number that no other tensor object has: ids of objects that are gone are used again."""
        number, known = self._numbers.get(id(tensor), (0, None))
        if known is None or known() is not tensor:
            number = len(self.taps) + 1
            self._numbers[id(tensor)] = number, weakref.ref(tensor)
        return number

    def _add(
        self,
        name: str,
        kind: Kind,
        item: str,
        tensor: Tensor,
        call: int,
        is_recomputed: bool,
        called: int,
        value: int = 0,
        computed: int = -1,
    ) -> None:
        with self._quietly(), torch.no_grad():
            placements = _placements(tensor) if isinstance(tensor, DTensor) else None
            local = plain(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
            kept = local.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            kept = kept.clone() if type(kept) is not Tensor else kept
        tap = Tap(
            module=name,
            kind=kind,
            item=item,
            call=call,
            step=self.step,
            is_recomputed=is_recomputed,
            dtype=str(kept.dtype).removeprefix("torch."),
            shape=list(kept.shape),
            placements=placements,
            collectives=self._count_collectives(),
            called=called,
            value=value,
            computed=computed,
        )
        self.taps.append(tap)
        self.tensors.append(kept)

    def _line(self, find: Callable[[FrameType], FrameType]) -> int:
        line = line_of(find(sys._getframe(1)))
        if line not in self._index:
            self._index[line] = len(self.lines)
            self.lines.append(line)
        return self._index[line]


_READABLE = ("cpu", "cuda")
"""Devices whose single numbers are read at once."""


def _number(result: Any) -> Tensor | None:
    """Return the result of an operator, or the first of its results, if that is a single real number."""
    first = result[0] if isinstance(result, tuple) and result else result
    return first if is_plain(first) and first.ndim == 0 and not first.is_complex() else None


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor and no subclass, such as the fake tensors of shape propagation."""
    return type(value) in (Tensor, nn.Parameter)


def _is_sharded_between(module: nn.Module, path: str, below: str) -> bool:
    """Return whether a module below another one, or one between them, is sharded by itself."""
    words = below.removeprefix(f"{path}.").split(".")
    paths = [".".join(words[: end + 1]) for end in range(len(words))]
    return any(isinstance(module.get_submodule(each), FSDPModule) for each in paths)


def _hook(tensor: Tensor, function: Callable[[Tensor], None]) -> Any:
    """Let a function see the gradient of a tensor; returns the handle of the hook."""
    return tensor.register_hook(function)  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's own forward is compiled as one graph, by `torch.compile` of it or of a method of it."""
    compiled = [value for value in vars(module).values() if hasattr(value, "_torchdynamo_orig_callable")]
    return hasattr(module, "_orig_mod") or bool(compiled) or getattr(module, "_compiled_call_impl", None) is not None


def _placements(tensor: DTensor) -> dict[str, str | int]:
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    return {name: _placement(placement) for name, placement in zip(names, tensor.placements, strict=False)}


def _placement(placement: Any) -> str | int:
    if placement.is_replicate():
        return REPLICATED
    return int(placement.dim) if hasattr(placement, "dim") else PARTIAL


_TORCH = str(Path(torch.__file__).parent)
_INSTRUMENTS = str(Path(__file__).parent)
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent)


_SUITE = tuple(f"{Path(__file__).parents[1] / package}{os.sep}" for package in ("subjects", "run", "experiments"))
"""Packages of the suite that call the code of a trainer, or are called by it."""


def owner(frame: FrameType) -> FrameType:
    """Return the innermost frame of neither torch, the standard library, an instrument nor the suite around a trainer.

    If there is none it is the innermost that may be of the suite, or else the outermost.
    """
    in_suite = None
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if not is_foreign(file):
            if not file.startswith(_SUITE):
                return frame
            in_suite = in_suite or frame
        frame = frame.f_back
    return in_suite or frame


def line_of(frame: FrameType) -> Line:
    """Return the line that a frame executes."""
    return Line(readable_path(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)


def _innermost(frame: FrameType) -> FrameType:
    """Return the frame that calls a function of `torch.distributed` which issues a collective."""
    while frame.f_back is not None and _issues(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _issues(file: str) -> bool:
    issuers = (
        "autograd.py",
        "function.py",
        "distributed_c10d.py",
        "_functional_collectives.py",
        "_ops.py",
        "c10d_logger.py",
        "_python_dispatch.py",
    )
    return file.startswith((_INSTRUMENTS, "<")) or file.endswith(issuers)


def is_foreign(file: str) -> bool:
    """Return whether a file is of torch, of the standard library, or an instrument."""
    in_library = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return in_library or file.startswith((_TORCH, _INSTRUMENTS, "<"))


def readable_path(file: str) -> str:
    """Return a file's path below its package's directory, below the project, or below the working directory.

    Another path is returned as it is.
    """
    return _readable_from(os.getcwd(), file)


@cache
def _readable_from(working_directory: str, file: str) -> str:
    """Return a file's readable path; remembered, since a tap names the line of each operator."""
    path = Path(file)
    for root in (Path(_TORCH).parent, PROJECT, working_directory):
        if path.is_relative_to(root):
            return path.relative_to(root).as_posix()
    return file
