"""Building of a sharded model: its memory, and random initialisation by torch itself."""

import msgspec
import torch
from torch.distributed.tensor import DTensor

from conformance.experiments.context import RankWorld, experiment
from conformance.instruments.capture import fingerprint, shard_indices
from conformance.instruments.device_memory import ledger_of
from conformance.instruments.facts import FULL_LAYOUT
from conformance.instruments.sharding import local
from conformance.run.experiment import Needs
from reference_trainer.build import build_model
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer
from reference_trainer.parallelize import parallelize
from reference_trainer.reshard import reshard_policy


class BuildMemory(msgspec.Struct):
    """Memory of one rank while it builds its shards, and afterwards."""

    peak_bytes: int
    """Peak of the allocated bytes while the model is built."""
    kept_bytes: int
    """Bytes still allocated after the model is built, see `MemoryLedger`."""
    held_bytes: int
    """Bytes of the storages of all parameters and buffers, with the padding that FSDP adds on the last ranks."""
    on_device: bool
    """True if these are bytes of a device, False if they are the host's."""


class SampledShards(msgspec.Struct):
    """Digests of a rank's shards, and of their layouts, by name of the parameter."""

    shards: dict[str, str]
    layouts: dict[str, str]


@experiment(needs=Needs.SHARDING)
def build_with_ledger(rank: RankWorld) -> BuildMemory:
    """Build the model as the configuration says, without training it, under a memory ledger."""
    config, mesh, policy = rank.config, rank.mesh, reshard_policy(rank.config, rank.dims, rank.device)
    with ledger_of(rank.device, mapped_bytes=rank.mapped_bytes) as ledger:
        model = build_model(config, mesh, rank.device, policy, Observer())
    storages = [local(tensor).untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
    held_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return BuildMemory(
        peak_bytes=ledger.peak_bytes,
        kept_bytes=ledger.kept_bytes,
        held_bytes=held_bytes,
        on_device=rank.device.type != "cpu",
    )


@experiment(needs=Needs.SHARDING)
def sample_with_torch(rank: RankWorld) -> SampledShards:
    """Initialise each parameter of the sharded model with `torch.nn.init.normal_`, from the same seed.

    Without a seed for each, ranks whose shards of an earlier parameter differ in size would sample all later ones from
    different states, and a fault would not show.
    """
    config = rank.config
    with torch.device("meta"):
        model = Transformer(config.model)
    parallelize(model, rank.mesh, config, reshard_policy(config, rank.dims, rank.device))
    model.to_empty(device=rank.device)
    shards, layouts = {}, {}
    for name, parameter in model.named_parameters():
        torch.manual_seed(config.seed)
        torch.nn.init.normal_(parameter)
        shards[name] = fingerprint(local(parameter).cpu())
        layouts[name] = fingerprint(shard_indices(parameter)) if isinstance(parameter, DTensor) else FULL_LAYOUT
    return SampledShards(shards, layouts)
