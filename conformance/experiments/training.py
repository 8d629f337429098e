"""What the ranks of a pool execute: a cell's training run, and the run that it goes on from."""

import os
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save_file

from conformance.defects.catalogue import injected
from conformance.experiments.context import start_process_group
from conformance.experiments.weight_files import write_weights
from conformance.instruments.capture import Capture
from conformance.instruments.delays import KINDS, delays
from conformance.instruments.held_checkpoints import HeldCheckpoints
from conformance.instruments.recorder import Recorder
from conformance.plan.cells import ALLOCATOR_VARIABLES, RECORD_STREAMS
from conformance.run.ranks.messages import RankContext
from conformance.run.record import tensor_file
from reference_trainer.checkpoint import Checkpoints, resume
from reference_trainer.config import TrainerConfig
from reference_trainer.mesh import destroy_process_group
from reference_trainer.train import Trainer


def train_cell(context: RankContext, payload: dict[str, Any]) -> dict[str, Any]:
    """Train as `payload["config"]` says, with the defect injected; returns RankFacts as builtin types, or what the
    trainer has not reported, `missing`.

    Each rank writes the tensors that it captured into the directory `payload["directory"]`; a run from a checkpoint
    finds its file there.
    """
    config = rank_config(context, payload)
    variables = {name: os.environ.get(name) for name in (RECORD_STREAMS, *ALLOCATOR_VARIABLES)}
    recorder = Recorder(rank=context.rank, variables=variables, profiled_step=_profiled_step(context, payload, config))
    with injected(payload["defect"]):
        device = start_process_group(context)
        with recorder.listening():
            trainer = Trainer(config, device=device, world_size=context.world_size, observer=recorder)
            first = resume(trainer, _saved(payload)) if payload["steps_before_save"] else 0
            steps = range(first, config.steps)
            metrics = [trainer.train_step(step) for step in steps]
            missing = recorder.missing(steps, metrics)
            if missing:
                return {"missing": missing}
            facts, tensors = recorder.finish(trainer, metrics)
        destroy_process_group()
    if config.compile != "none":
        torch.compiler.reset()  # else the rank's next task would run this one's graphs
    save_file(tensors, Path(payload["directory"], tensor_file(context.rank)))
    return {"facts": msgspec.to_builtins(facts)}


def _profiled_step(context: RankContext, payload: dict[str, Any], config: TrainerConfig) -> int | None:
    """The last, if it is not the first as well, on rank 0 of a run on devices without a defect.

    On the CPU it would cost a sixth of a run, and what communication is exposed there is that of no device.
    """
    steps = config.steps - payload["steps_before_save"]
    wanted = context.device and context.rank == 0 and payload["defect"] is None
    return config.steps - 1 if wanted and steps > 1 else None


def train_late(context: RankContext, payload: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Train as `train_cell` does with operators delayed; fingerprints of all that was captured, by what was late.

    That is `all`; and on a device, where streams can overtake each other, also each of `delays.KINDS`.
    """
    config = rank_config(context, payload)
    found = {}
    with injected(payload["defect"]):
        device = start_process_group(context)
        apart = {kind: (kind,) for kind in KINDS} if device.type == "cuda" else {}
        for late, chosen in {"all": KINDS, **apart}.items():
            capture = Capture()
            with delays(chosen, device=device, is_last=context.rank == context.world_size - 1):
                trainer = Trainer(config, device=device, world_size=context.world_size, observer=capture)
                for step in range(config.steps):
                    trainer.train_step(step)
            capture.final(trainer.model, trainer.optimizer)
            found[late] = capture.fingerprints
        destroy_process_group()
    return found


def train_and_save(context: RankContext, payload: dict[str, Any]) -> None:
    """Train `payload["steps_before_save"]` steps with the defect injected, and save a checkpoint in the directory."""
    config = msgspec.convert(payload["config"], TrainerConfig)
    with injected(payload["defect"]):
        device = start_process_group(context)
        trainer = Trainer(config, device=device, world_size=context.world_size)
        done = payload["steps_before_save"]
        for step in range(done):
            trainer.train_step(step)
        if payload["saving"] == "async":
            held = HeldCheckpoints(_saved(payload))
            held.save(trainer, steps_done=done)
            ahead = trainer.train_step(done)
            (_saved(payload) / f"trained-{ahead.step}").touch()  # for AXIS-1
            held.release()
            held.finish()
        else:
            Checkpoints(_saved(payload)).save(trainer, steps_done=done)
        destroy_process_group()


def _saved(payload: dict[str, Any]) -> Path:
    return Path(payload["directory"], "checkpoints")


def rank_config(context: RankContext, payload: dict[str, Any]) -> TrainerConfig:
    """The configuration in the payload; rank 0 writes the checkpoint that it names into the task's directory."""
    config = msgspec.convert(payload["config"], TrainerConfig)
    if config.checkpoint is None:
        return config
    path = Path(payload["directory"], config.checkpoint)
    config = msgspec.structs.replace(config, checkpoint=str(path))
    if context.rank == 0:
        write_weights(path, config, form=payload["weights"])
    return config
