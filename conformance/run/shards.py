"""Shards that ranks captured, and the full tensors that are assembled from them.

Assembling uses none of the collectives that laws judge.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from safetensors import safe_open

from conformance.instruments.facts import FULL_LAYOUT
from conformance.outcomes import ConformanceFailure

if TYPE_CHECKING:
    from torch import Tensor


class ParameterShape(Protocol):
    """Facts of a parameter that assembling needs."""

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the full parameter."""


class ShardFacts(Protocol):
    """Facts of one rank that assembling needs, see `conformance.instruments.facts.RankFacts`."""

    @property
    def rank(self) -> int:
        """Number of the rank."""

    @property
    def parameters(self) -> Mapping[str, ParameterShape]:
        """Shapes by parameter."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """Fingerprints of captured tensors by the keys of `Capture`."""

    @property
    def layouts(self) -> Mapping[str, str]:
        """Fingerprint of the indices of this rank's shard, by sharded parameter."""


class CapturedShards(ABC):
    """Tensors that `conformance.instruments.capture.Capture` left on each rank of a world, in a directory."""

    def __init__(self, directory: Path, *, name: str, world_size: int) -> None:
        self.directory = directory
        self.world_size = world_size
        self._name = name
        self._full: dict[str, dict[str, Any]] = {}

    @property
    @abstractmethod
    def ranks(self) -> Sequence[ShardFacts]:
        """Facts by rank."""

    @cached_property
    def shards(self) -> "list[Mapping[str, Tensor]]":
        """Captured tensors of any shape and dtype by rank and key, see `conformance.instruments.capture.Capture`."""
        return [TensorFile(self.directory / tensor_file(rank)) for rank in range(self.world_size)]

    def select(self, prefix: str) -> "dict[str, Tensor]":
        """Return the full tensors whose keys begin with `WHEN/KIND/`, by the rest of the key.

        Elements that no rank holds are NaN. Shapes and dtypes are those of the full parameters.

        Raises ConformanceFailure if there is none, if a rank's tensor has another shape than its shard, or if ranks
        that hold the same elements hold other bits.
        """
        if prefix not in self._full:
            self._require_equal_copies(prefix)
            keys = dict.fromkeys(key for shards in self.shards for key in shards if key.startswith(prefix))
            names = [key.removeprefix(prefix) for key in keys]
            if not names:
                raise ConformanceFailure(f"no rank of {self._name} has a tensor {prefix}...")
            self._full[prefix] = {name: self._assemble(prefix, name) for name in names}
        return dict(self._full[prefix])  # many laws ask for the same tensors, which none of them changes

    def kinds(self, when: str) -> list[str]:
        """Return the kinds of tensors that were captured at a time: KIND of the keys `WHEN/KIND/NAME`, sorted."""
        keys = {key for facts in self.ranks for key in facts.fingerprints if key.startswith(f"{when}/")}
        return sorted({key.split("/")[1] for key in keys})

    @cached_property
    def parameters(self) -> Mapping[str, ParameterShape]:
        """Facts of each parameter on the first rank that holds it: a rank of a pipeline holds those of its stages."""
        return {name: facts for rank in reversed(self.ranks) for name, facts in rank.parameters.items()}

    def shards_below(self, prefix: str, *, rank: int) -> "dict[str, Tensor]":
        """Return a rank's tensors whose keys begin with `WHEN/KIND/`, by the rest of the key."""
        shards = self.shards[rank]
        return {key.removeprefix(prefix): shards[key] for key in shards if key.startswith(prefix)}

    @cached_property
    def unequal_copies(self) -> list[tuple[str, int]]:
        """Yield key and rank of each captured tensor that differs in bits from the copy of an earlier rank.

        Copies are tensors of one key that hold the same elements of the full tensor.
        """
        first: dict[tuple[str, str], str] = {}
        unequal = []
        for facts in self.ranks:
            for key, fingerprint in facts.fingerprints.items():
                _, kind, name = key.split("/", 2)
                layout = FULL_LAYOUT if kind == "gathered" else facts.layouts.get(name, FULL_LAYOUT)
                if first.setdefault((key, layout), fingerprint) != fingerprint:
                    unequal.append((key, facts.rank))
        return unequal

    def _require_equal_copies(self, prefix: str) -> None:
        """Require equal copies: an assembled tensor has the elements of one rank, and represents the copies of all."""
        for key, rank in self.unequal_copies:
            if key.startswith(prefix):
                raise ConformanceFailure(f"{key}: rank {rank} holds other bits than a rank with the same elements")

    def is_partitioned(self, name: str) -> bool:
        """Return whether the ranks of a parameter hold each of its elements, all equally often.

        A parameter without elements is partitioned by the ranks that have a shard of it.
        """
        numel, layout = math.prod(self.parameters[name].shape), f"layout/{name}"
        held = [shards[layout].flatten() for shards in self.shards if layout in shards]
        counts = [indices.bincount(minlength=numel).tolist() for indices in held]
        owners = {sum(holders) for holders in zip(*counts, strict=True)}
        return bool(held) and len(owners) <= 1 and 0 not in owners

    def _assemble(self, prefix: str, name: str) -> "Tensor":
        facts, layout = self.parameters.get(name), f"layout/{name}"
        first = next(shards for shards in self.shards if prefix + name in shards)
        if facts is None or layout not in first or prefix.endswith("/gathered/"):
            return first[prefix + name]
        full = first[prefix + name].new_full((math.prod(facts.shape),), math.nan)
        for rank, shards in enumerate(self.shards):
            if name not in self.ranks[rank].parameters:
                continue
            shard, indices = shards.get(prefix + name), shards[layout]
            if shard is None or shard.shape != indices.shape:
                held = "nothing" if shard is None else f"a tensor of shape {tuple(shard.shape)}"
                raise ConformanceFailure(
                    f"{prefix}{name}: rank {rank} holds {held}, its shard has shape {tuple(indices.shape)}"
                )
            full[indices.flatten()] = shard.flatten()
        return full.view(facts.shape)


class TensorFile(Mapping[str, "Tensor"]):
    """Tensors of a file by key, each read when it is first asked for: a law asks for few of them."""

    def __init__(self, file: Path) -> None:
        self._file: Any = safe_open(file, framework="pt")  # which imports torch, only in processes that judge tensors
        self._read: dict[str, Tensor | None] = dict.fromkeys(self._file.keys())  # type: ignore[no-untyped-call]

    def __getitem__(self, key: str) -> "Tensor":
        tensor = self._read[key]
        if tensor is None:
            tensor = self._read[key] = self._file.get_tensor(key)
        return tensor

    def __contains__(self, key: object) -> bool:
        return key in self._read

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def tensor_file(rank: int) -> str:
    """Return the name of the file with the tensors that a rank captured."""
    return f"rank{rank}.safetensors"
