"""Full tensors of a run whose copies on several ranks may differ, which laws would refuse to assemble."""

import math

from torch import Tensor

from conformance.run.shards import CapturedShards


def assembled(record: CapturedShards, prefix: str) -> dict[str, Tensor]:
    """Return the full tensors whose keys begin with `WHEN/KIND/`, by the rest of the key.

    Of elements that several ranks hold, those of the first rank count. Elements that no rank holds are NaN.
    """
    full: dict[str, Tensor] = {}
    for shards in record.shards:
        for key, shard in shards.items():
            if key.startswith(prefix):
                _fill(full, record, key.removeprefix(prefix), shard, shards.get(f"layout/{key.removeprefix(prefix)}"))
    return full


def _fill(full: dict[str, Tensor], record: CapturedShards, name: str, shard: Tensor, indices: Tensor | None) -> None:
    facts = record.parameters.get(name)
    if indices is None or facts is None or indices.shape != shard.shape:
        full.setdefault(name, shard)
        return
    if name not in full:
        full[name] = shard.new_full(tuple(facts.shape), math.nan if shard.is_floating_point() else 0)
    flat = full[name].view(-1)
    missing = flat[indices.flatten()].isnan()
    flat[indices.flatten()[missing]] = shard.flatten()[missing]
