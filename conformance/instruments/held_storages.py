"""Storages that a run holds: each with the line that allocated it, and those that are alive at moments of a step.

Storages are known by weak references, so that the instrument keeps none alive. `UntypedStorage` has no public one:
`torch.multiprocessing.reductions.StorageWeakRef` is torch's own, and tells nothing of the bytes, which FSDP changes.
Memory inside of an operator, and that of process groups, is not seen.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from conformance.instruments.collectives import NAMESPACES, collective_kind
from conformance.instruments.dispatch_tap import DispatchTap, OutcomeHandler
from conformance.instruments.fsdp_state import unsharded_gradients
from conformance.instruments.issuers import issuing_group, issuing_module
from conformance.instruments.sharding import is_sharded_by_fsdp
from conformance.instruments.taps import Line, readable_path
from reference_trainer.observer import Observer, Phase

UNSHARDED = "unsharded parameters"
GATHERED = "output of all_gather"
TO_REDUCE = "input of reduce_scatter"
REDUCED = "output of reduce_scatter"
GRADIENT = "gradient"
TO_ACCUMULATE = "unsharded gradients"
"""Purposes of storages that are known, beside `parameter`, `buffer` and `optimizer state KIND`."""
_PURPOSES = {("all_gather", "output_tensor"): GATHERED, ("reduce_scatter", "input_tensor"): TO_REDUCE}
_PURPOSES[("reduce_scatter", "output_tensor")] = REDUCED
_UNSHARDING = ("init_all_gather_outputs", "to_sharded_post_forward")
"""Functions of FSDP that allocate unsharded parameters, or the shards that are left of them after forward."""
_COPY_OUT = "split_with_sizes_copy"
"""Part of the name of the operator that fills unsharded parameters."""


class HeldSite(msgspec.Struct, frozen=True, kw_only=True):
    """Storages that are alive at a moment, and that one line has allocated for one purpose in one phase of a step."""

    file: str
    line: int
    function: str
    operator: str
    """Operator that allocated the first of them, such as `aten::empty`."""
    purpose: str
    """Use that is known, such as `output of all_gather` or `gradient`; else nothing."""
    place: str
    """Group of FSDP, module in forward, or parameter, for which they were allocated."""
    step: int
    phase: str
    count: int
    nbytes: int


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """Moment of a step: the peak of a phase, or its end (`rest`)."""

    step: int
    phase: str
    kind: str
    group: str
    """Modules of the group whose parameters were unsharded last."""
    nbytes: int
    held: list[HeldSite]


@dataclass
class _Storage:
    """Storage that was seen, alive or not."""

    reference: StorageWeakRef
    line: Line
    operator: str
    place: str
    step: int
    phase: str
    purpose: str = ""

    @property
    def is_gone(self) -> bool:
        """True if nothing refers to the storage."""
        return bool(self.reference.expired())  # type: ignore[no-untyped-call]

    def nbytes(self) -> int:
        """Bytes at present; 0 if the storage is gone."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.reference.cdata)
        return 0 if storage is None else int(storage.nbytes())


@dataclass
class _Peak:
    nbytes: int = -1
    group: str = ""
    held: list[tuple[_Storage, int]] = field(default_factory=list)


class HeldStorages(Observer):
    """Storages of a run, of which `moments` has the peak and the end of each phase of the watched steps."""

    def __init__(self, watched: Sequence[int]) -> None:
        self.moments: list[Moment] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self._watched = watched
        self._model: nn.Module | None = None
        self._paths: dict[int, str] = {}
        self._step, self._phase = -1, "build"
        self._storages: dict[int, _Storage] = {}
        self._peak = _Peak()
        self._group = ""
        self._tap = DispatchTap([], outcomes=[self._listen])

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Open the context in which the run must take place; the last phase ends with it."""
        with self._tap:
            yield
        self._end_phase()

    def phase(self, name: Phase, *, step: int) -> None:
        """End the phase that was, and begin another one."""
        self._end_phase()
        self._step, self._phase = step, name

    def sharded(self, model: nn.Module) -> None:
        """Know the paths of the modules."""
        self._model = model
        self._paths = {id(module): path for path, module in model.named_modules()}

    def initialized(self, model: nn.Module) -> None:
        """Know the storages of parameters and buffers."""
        self.sharded(model)
        self._note_owners()

    def _listen(self, func: Any) -> OutcomeHandler | None:
        name = func._schema.name
        kind = collective_kind(name) if func.namespace in NAMESPACES else None
        if kind is not None:
            return partial(self._communicate, name, kind, [a.name for a in func._schema.arguments])
        return partial(self._allocate, name)

    def _allocate(self, operator: str, _args: Sequence[Any], _kwargs: Any, result: Any) -> None:
        if _COPY_OUT in operator:
            self._group = issuing_group(sys._getframe(1)) or self._group
        new = [self._add(operator, tensor) for tensor in _tensors(result)]
        if any(new) or operator.startswith("fsdp::"):
            self._note_peak()

    def _communicate(
        self, operator: str, kind: str, names: Sequence[str], args: Sequence[Any], _kwargs: Any, result: Any
    ) -> None:
        group = issuing_group(sys._getframe(1))
        for name, value in zip(names, args, strict=False):
            for tensor in _tensors(value) if group else ():
                self._add(operator, tensor)
                storage = self._storages[_key(tensor)]
                if not storage.purpose and (kind, name) in _PURPOSES:
                    storage.purpose, storage.place = _PURPOSES[kind, name], group
        self._allocate(operator, args, _kwargs, result)

    def _add(self, operator: str, tensor: Tensor) -> bool:
        """Remember the storage of a tensor; returns whether it is new."""
        if tensor.device.type == "meta" or _key(tensor) in self._storages:
            return False
        frame = sys._getframe(1)
        group, module = issuing_group(frame), issuing_module(frame)
        line = _line(_allocating(frame))
        self._storages[_key(tensor)] = _Storage(
            StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]
            line,
            operator,
            group or self._paths.get(id(module), ""),
            self._step,
            self._phase,
            UNSHARDED if group and line.function in _UNSHARDING else "",
        )
        return True

    def _live(self) -> list[tuple[_Storage, int]]:
        """Return the storages that are alive, with their bytes, and forget the others."""
        self._storages = {key: storage for key, storage in self._storages.items() if not storage.is_gone}
        return [(storage, nbytes) for storage in self._storages.values() if (nbytes := storage.nbytes())]

    def _note_peak(self) -> None:
        if self._step not in self._watched:
            return
        live = self._live()
        total = sum(nbytes for _, nbytes in live)
        if total > self._peak.nbytes:
            self._peak = _Peak(total, self._group, live)

    def _end_phase(self) -> None:
        self._note_owners()
        live = self._live()
        if self._step in self._watched:
            self._note_peak()
            self._keep("peak", self._peak.held, self._peak.group)
            self._keep("rest", live, self._group)
        self._peak = _Peak()

    def _keep(self, kind: str, live: Sequence[tuple[_Storage, int]], group: str) -> None:
        held = _sites(live)
        nbytes = sum(site.nbytes for site in held)
        self.moments.append(
            Moment(step=self._step, phase=self._phase, kind=kind, group=group, nbytes=nbytes, held=held)
        )

    def _note_owners(self) -> None:
        """Note which storages are parameters, gradients, buffers and state of the optimizer."""
        if self._model is None:
            return
        with self._tap.deaf(), torch.no_grad():
            for name, parameter in self._model.named_parameters():
                self._own("parameter", name, parameter)
                self._own(GRADIENT if is_sharded_by_fsdp(parameter) else TO_ACCUMULATE, name, parameter.grad)
                state = self.optimizer.state.get(parameter, {}) if self.optimizer else {}
                for kind, value in state.items():
                    self._own(f"optimizer state {kind}", name, value)
            for name, gradient in unsharded_gradients(self._model):
                self._own(TO_ACCUMULATE, name, gradient)
            for name, buffer in self._model.named_buffers():
                self._own("buffer", name, buffer)

    def _own(self, purpose: str, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            return
        local = value.to_local() if isinstance(value, DTensor) else value
        storage = self._storages.get(_key(local))
        if storage is not None and storage.purpose in ("", REDUCED):
            storage.purpose, storage.place = purpose, name


def _sites(live: Sequence[tuple[_Storage, int]]) -> list[HeldSite]:
    """Return storages by the line, purpose, place and phase of their allocation, the largest in sum at the front."""
    together: dict[tuple[Any, ...], list[tuple[_Storage, int]]] = {}
    for storage, nbytes in live:
        key = (storage.line, storage.purpose, storage.place, storage.step, storage.phase)
        together.setdefault(key, []).append((storage, nbytes))
    sites = [
        HeldSite(
            file=line.file,
            line=line.number,
            function=line.function,
            operator=storages[0][0].operator,
            purpose=purpose,
            place=place,
            step=step,
            phase=phase,
            count=len(storages),
            nbytes=sum(nbytes for _, nbytes in storages),
        )
        for (line, purpose, place, step, phase), storages in together.items()
    ]
    return sorted(sites, key=lambda site: -site.nbytes)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _key(tensor: Tensor) -> int:
    """Return the address of a storage, which no other one gets as long as there is a weak reference to it."""
    return int(tensor.untyped_storage()._cdata)


_TORCH = str(Path(torch.__file__).parent)
_INSTRUMENTS = str(Path(__file__).parent)
_STANDARD_LIBRARY = str(Path(contextlib.__file__).parent)
_SHOWN = tuple(f"{_TORCH}/{package}" for package in ("distributed/fsdp", "distributed/pipelining", "optim"))
"""Parts of torch whose lines are told; other lines of torch run on behalf of their callers."""


def _allocating(frame: FrameType) -> FrameType:
    """Return the innermost frame of a trainer, of FSDP, of pipelines or of an optimizer; the outermost if none is."""
    while frame.f_back is not None and _is_passed_over(frame.f_code):
        frame = frame.f_back
    return frame


def _is_passed_over(code: CodeType) -> bool:
    file = code.co_filename
    if code.co_name.startswith("<"):  # a comprehension, whose function says more
        return True
    if file.startswith(_SHOWN):
        return False
    in_library = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return in_library or file.startswith((_TORCH, _INSTRUMENTS, "<"))


def _line(frame: FrameType) -> Line:
    return Line(readable_path(frame.f_code.co_filename), frame.f_lineno, frame.f_code.co_name)
