"""Use of the results of collectives: results that a rank had already, or of which it reads its own share alone.

Each element of a result has a number. Copies of it that only move elements (`cat`, `clone`, a cast) keep the numbers,
so that a read of a copy is known as one of the result. A read inside of a compiled graph, or of NumPy, is not seen.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.instruments.collectives import NAMESPACES, collective_kind, input_tensors, process_group
from conformance.instruments.dispatch_tap import OutcomeHandler
from conformance.instruments.issuers import is_of_fsdp

Waste = Literal["sent again", "sent a piece of a result", "own share read"]
_OUTPUTS = ("output_tensor", "output_tensors", "output_lists", "outputs", "out")
_MOVES = ("aten::cat", "aten::stack", "aten::clone", "aten::_to_copy")
_SHAPES_ALONE = ("_like", "aten::new_")
_SAME_TENSOR = ("wait_tensor", "wrap_tensor_autograd", "wrap_tensor")
_PLAIN = (Tensor, torch.nn.Parameter)
_UNKNOWN = -1


class UseOfCollective(msgspec.Struct, frozen=True):
    """Collective that a rank could have done without, or with less."""

    number: int
    """Position in the rank's log of collectives."""
    waste: Waste
    """`sent again`: the same tensor, although the result of an earlier gather was still there, unchanged.
    `sent a piece of a result`: a tensor that is cut from the result of an earlier collective of the same ranks, which
    was still there. `own share read`: of the result this rank has read nothing but its own n-th."""


@dataclass(eq=False)
class _Result:
    """Result of a collective, wherever copies of it are."""

    number: int
    shape: torch.Size
    ranks: tuple[int, ...]
    own: int
    """Position of this rank in the group."""
    is_gathered: bool
    key: tuple[Any, ...] | None
    """Tensor that was gathered: storage, version, ranks and geometry."""
    read: Tensor
    """True for each element that was read, flat; on the host."""
    cut_from: "_Result | None" = None
    """Result from which the tensor that was sent is cut."""
    storages: set[int] = field(default_factory=set)
    """Storages that have some of the elements."""

    def is_own_share_read(self) -> bool:
        """Return whether some elements were read, and none but this rank's n-th."""
        if not self.read.any():
            return False
        if self.is_gathered:
            share = self.read.numel() // len(self.ranks)
            return not self.read[: self.own * share].any() and not self.read[(self.own + 1) * share :].any()
        read = self.read.view(self.shape)
        return any(self._is_in_chunk(read, dim) for dim in range(read.ndim))

    def _is_in_chunk(self, read: Tensor, dim: int) -> bool:
        chunks = read.chunk(len(self.ranks), dim)
        others = [chunk for place, chunk in enumerate(chunks) if place != self.own]
        return len(chunks) == len(self.ranks) and not any(bool(chunk.any()) for chunk in others)


@dataclass(eq=False)
class _Shadow:
    """Numbers of the elements of a storage: those that they have in the result of a collective."""

    result: _Result
    numbers: Tensor
    itemsize: int
    storage: weakref.ref[torch.UntypedStorage]

    def fits(self, tensor: Tensor) -> bool:
        """Return whether the storage of a tensor is still divided into as many elements."""
        has = tensor.untyped_storage().nbytes() // tensor.element_size()
        return (self.itemsize, self.numbers.numel()) == (tensor.element_size(), has)

    def numbers_of(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a tensor's elements, as a view of its shape."""
        return self.numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class CollectiveUse:
    """Listener of the dispatch tap that follows the results of all-gathers and all-reduces of floating numbers.

    Statistics, of fewer than two dimensions, and FSDP's own collectives are left out.
    """

    def __init__(self, *, count_collectives: Callable[[], int], settle: Callable[[], None]) -> None:
        """`count_collectives` returns the number of collectives so far, with the present one.

        `settle` waits until the threads of process groups have released what they no longer need.
        """
        self.is_on = False
        """True while results of new collectives are followed."""
        self._count, self._settle = count_collectives, settle
        self._shadows: dict[int, _Shadow] = {}
        self._sent: dict[tuple[Any, ...], _Result] = {}
        self._sources: dict[tuple[Any, ...], weakref.ref[torch.UntypedStorage]] = {}
        self._found: list[UseOfCollective] = []

    def facts(self) -> list[UseOfCollective]:
        """Return all that was found."""
        for result in {id(shadow.result): shadow.result for shadow in self._shadows.values()}.values():
            self._judge(result)
        self._shadows.clear()
        return sorted(self._found, key=lambda found: found.number)

    def listen_to_outcomes(self, func: Any) -> OutcomeHandler | None:
        """Return the handler of an operator; to be a listener of the outcomes of a `DispatchTap`."""
        name = func._schema.name
        if func.namespace in NAMESPACES:
            kind = collective_kind(name)
            if kind in ("all_gather", "all_reduce"):
                return partial(self._communicate, [each.name for each in func._schema.arguments], kind == "all_gather")
            return None if name.endswith(_SAME_TENSOR) else self._read_and_forget
        if func.namespace == "aten" and any(word in name for word in _SHAPES_ALONE):
            return None
        return partial(self._move if name in _MOVES else self._compute, func)

    def _communicate(
        self, names: Sequence[str], is_gather: bool, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        inputs, outputs = input_tensors(arguments), _outputs(arguments, result)
        ranks = tuple(dist.get_process_group_ranks(process_group(arguments)))
        follows = self.is_on and len(inputs) == len(outputs) and not is_of_fsdp(sys._getframe(1))
        results = [self._result(tensor, ranks, is_gather) if follows and _counts(tensor) else None for tensor in inputs]
        for each in filter(None, results):
            self._look_for_an_earlier(each)
        for tensor in inputs:
            self._read(tensor)
        for tensor in _tensors(outputs):
            self._forget(tensor)
        for sent, source, output in zip(results, inputs, outputs, strict=False):
            if sent is not None:
                self._follow(sent, source, list(_tensors(output)))

    def _result(self, sent: Tensor, ranks: tuple[int, ...], is_gather: bool) -> _Result:
        """Return the result that the collective has for a tensor of this rank."""
        storage = sent.untyped_storage()
        geometry = sent.storage_offset(), sent.shape, sent.stride()
        cut_from = self._shadow(sent)
        numel = sent.numel() * len(ranks) if is_gather else sent.numel()
        return _Result(
            number=self._count() - 1,
            shape=sent.shape,
            ranks=ranks,
            own=ranks.index(dist.get_rank()),
            is_gathered=is_gather,
            key=(id(storage), sent._version, ranks, *geometry) if is_gather and not sent.is_inference() else None,
            cut_from=cut_from.result if cut_from and bool((cut_from.numbers_of(sent) >= 0).all()) else None,
            read=torch.zeros(numel, dtype=torch.bool),
        )

    def _look_for_an_earlier(self, sent: _Result) -> None:
        """Note a gather of elements that the result of an earlier collective has, if that is still there."""
        earlier = self._sent.get(sent.key) if sent.key else None
        if earlier and self._is_there(earlier):
            self._found.append(UseOfCollective(sent.number, "sent again"))
        cut_from = sent.cut_from if sent.is_gathered else None
        if cut_from and cut_from.ranks == sent.ranks and self._is_there(cut_from):
            self._found.append(UseOfCollective(sent.number, "sent a piece of a result"))
        sent.cut_from = None

    def _is_there(self, result: _Result) -> bool:
        """Return whether all elements of a result are still there when no thread of a process group holds them."""
        if not self._has_all(result):
            return False
        self._settle()
        return self._has_all(result)

    def _has_all(self, result: _Result) -> bool:
        numbers = [self._shadows[key].numbers for key in result.storages]
        return bool(numbers) and torch.unique(torch.cat(numbers)).ge(0).sum().item() == result.read.numel()

    def _follow(self, result: _Result, source: Tensor, targets: Sequence[Tensor]) -> None:
        begin = 0
        for target in targets:
            self._number(result, target, torch.arange(begin, begin + target.numel()).view(target.shape))
            begin += target.numel()
        if result.key:
            storage, key = source.untyped_storage(), result.key
            self._sent[key] = result
            self._sources[key] = weakref.ref(storage, lambda _: self._forget_key(key))

    def _forget_key(self, key: tuple[Any, ...]) -> None:
        self._sent.pop(key, None)
        self._sources.pop(key, None)

    def _number(self, result: _Result, target: Tensor, numbers: Tensor) -> None:
        """Give the elements of a new tensor the numbers of those of a result; both have one shape."""
        storage = target.untyped_storage()
        key = id(storage)  # Python's object lives as long as the memory, whoever refers to it
        shadow = self._shadows.get(key)
        if shadow is None or shadow.result is not result or not shadow.fits(target):
            self._drop(key)
            unknown = torch.full((storage.nbytes() // target.element_size(),), _UNKNOWN)
            reference = weakref.ref(storage, lambda _: self._drop(key))
            shadow = self._shadows[key] = _Shadow(result, unknown, target.element_size(), reference)
            result.storages.add(key)
        shadow.numbers_of(target).copy_(numbers)

    def _move(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        """Let a copy keep the numbers of its elements, if all are of one result; otherwise they are read."""
        if not self._shadows:
            return
        sources = list(_tensors(args))
        shadows = [shadow for tensor in sources if (shadow := self._shadow(tensor))]
        results = {id(shadow.result): shadow.result for shadow in shadows}
        if len(shadows) != len(sources) or len(results) != 1 or _is_view(result, sources):
            self._compute(func, args, kwargs, result)
            return
        numbers = [shadow.numbers_of(tensor) for shadow, tensor in zip(shadows, sources, strict=True)]
        renumbered = func(numbers, *args[1:], **kwargs) if isinstance(args[0], list | tuple) else numbers[0]
        self._number(shadows[0].result, result, renumbered)

    def _compute(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        if not self._shadows:
            return
        sources = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        if func._schema.is_mutable:
            written = [
                given
                for argument, given in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self._read_all(sources)
            for tensor in [*_tensors(written), *_tensors(kwargs.get("out"))]:
                self._forget(tensor)
        elif not _is_view(result, sources):
            self._read_all(sources)

    def _read_and_forget(self, args: Sequence[Any], kwargs: Mapping[str, Any], _result: Any) -> None:
        """See another collective, which may read each of its tensors, and write into it."""
        for tensor in [*_tensors(args), *_tensors(tuple(kwargs.values()))] if self._shadows else ():
            self._read(tensor)
            self._forget(tensor)

    def _read_all(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._read(tensor)

    def _read(self, tensor: Tensor) -> None:
        shadow = self._shadow(tensor)
        if shadow is not None:
            numbers = shadow.numbers_of(tensor)
            shadow.result.read[numbers[numbers >= 0]] = True

    def _shadow(self, tensor: Tensor) -> _Shadow | None:
        """Return the numbers of a tensor's storage; those of another element size or storage size count as read."""
        shadow = self._shadows.get(id(tensor.untyped_storage()))
        if shadow is None or shadow.fits(tensor):
            return shadow
        shadow.result.read.fill_(True)
        self._forget(tensor)
        return None

    def _forget(self, tensor: Tensor) -> None:
        """Follow the storage of a tensor no longer, which gets other contents."""
        self._drop(id(tensor.untyped_storage()))

    def _drop(self, key: int) -> None:
        shadow = self._shadows.pop(key, None)
        if shadow is None:
            return
        result = shadow.result
        result.storages.discard(key)
        if not result.storages:
            self._judge(result)

    def _judge(self, result: _Result) -> None:
        """Note a result that is gone, of which this rank has read its own share alone."""
        if result.is_own_share_read():
            self._found.append(UseOfCollective(result.number, "own share read"))


def _outputs(arguments: Mapping[str, Any], result: Any) -> list[Any]:
    """Return the output of each tensor that is sent: a tensor, or a list with one for each rank."""
    given = next((arguments[name] for name in _OUTPUTS if name in arguments), None)
    if given is None:
        given = arguments.get("tensors", result)  # reduced in place, or functional
    return [given] if isinstance(given, Tensor) else list(given)


def _counts(tensor: Tensor) -> bool:
    """Return whether a tensor is no number, index or statistic: fewer dimensions have numbers for each expert, say."""
    return tensor.is_floating_point() and tensor.ndim > 1 and tensor.numel() > 1 and type(tensor) in _PLAIN


def _is_view(result: Any, sources: Sequence[Tensor]) -> bool:
    """Return whether an operator that changes nothing has only returned views of its arguments."""
    storages = {id(tensor.untyped_storage()) for tensor in sources}
    results = list(_tensors(result))
    return bool(results) and all(id(tensor.untyped_storage()) in storages for tensor in results)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the plain, dense tensors in a value."""
    if isinstance(value, Tensor):
        if type(value) in _PLAIN and value.layout == torch.strided:
            yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)
