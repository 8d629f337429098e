"""What ranks measure outside of a training run: their surroundings, memory while building, torch's own random init."""

from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed.tensor import DTensor

from conformance.defects.catalogue import injected
from conformance.experiments.context import start_process_group
from conformance.experiments.training import rank_config
from conformance.instruments.capture import WHOLE, fingerprint, shard_indices
from conformance.instruments.device_memory import ledger_of
from conformance.instruments.probe import probe_environment
from conformance.instruments.sharding import local
from conformance.run.ranks.messages import RankContext
from reference_trainer.build import build_model
from reference_trainer.config import TrainerConfig
from reference_trainer.mesh import build_mesh, destroy_process_group
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer
from reference_trainer.parallel_dims import resolve_mesh
from reference_trainer.parallelize import parallelize
from reference_trainer.reshard import reshard_policy


def build_with_ledger(context: RankContext, payload: dict[str, Any]) -> dict[str, int]:
    """Build the model as `payload["config"]` says, and nothing else; returns bytes, see MemoryLedger."""
    config = rank_config(context, payload)
    with injected(payload["defect"]):
        device = start_process_group(context)
        dims = resolve_mesh(config.mesh, world_size=context.world_size)
        mesh, policy = build_mesh(dims, device), reshard_policy(config, dims, device)
        mapped_bytes = [Path(config.checkpoint).stat().st_size] if config.checkpoint else []
        with ledger_of(device, mapped_bytes=mapped_bytes) as ledger:
            model = build_model(config, mesh, device, policy, Observer())
        # Of storages: FSDP pads the shards of the last ranks.
        storages = [local(tensor).untyped_storage() for tensor in (*model.parameters(), *model.buffers())]
        held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        destroy_process_group()
    return {"peak_bytes": ledger.peak_bytes, "kept_bytes": ledger.kept_bytes, "held_bytes": held}


def draw_with_torch(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Initialise the sharded model with `torch.nn.init`; returns digests of this rank's shards and of their layouts."""
    config = msgspec.convert(payload["config"], TrainerConfig)
    with injected(payload["defect"]):
        device = start_process_group(context)
        dims = resolve_mesh(config.mesh, world_size=context.world_size)
        mesh = build_mesh(dims, device)
        with torch.device("meta"):
            model = Transformer(config.model)
        parallelize(model, mesh, config, reshard_policy(config, dims, device))
        model.to_empty(device=device)
        torch.manual_seed(config.seed)
        shards, layouts = {}, {}
        for name, parameter in model.named_parameters():
            torch.nn.init.normal_(parameter)
            shards[name] = fingerprint(local(parameter).cpu())
            layouts[name] = fingerprint(shard_indices(parameter)) if isinstance(parameter, DTensor) else WHOLE
        destroy_process_group()
    return {"shards": shards, "layouts": layouts}


def probe(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Facts about a rank's surroundings as builtin types, see `probe_environment`."""
    with injected(payload["defect"]):
        facts = probe_environment(start_process_group(context))
        destroy_process_group()
    return facts
