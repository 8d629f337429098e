"""Training of a cell in this process, as a world of one rank, and records of it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from conformance.instruments.facts import RankFacts
from conformance.instruments.recorder import Recorder
from conformance.plan.cells import Cell
from conformance.run.record import Header, Record, RecordFile
from conformance.run.shards import tensor_file
from reference_trainer.train import Trainer


@contextmanager
def world_of_one_rank() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def train(cell: Cell) -> tuple[RankFacts, dict[str, Tensor]]:
    recorder = Recorder(rank=0, variables={})
    with recorder.listening():
        trainer = Trainer(cell.config, device=torch.device("cpu"), world_size=1, observer=recorder)
        return recorder.finish(trainer, [trainer.train_step(step) for step in range(cell.steps)])


def record_of(directory: Path, cell: Cell, facts: RankFacts, tensors: dict[str, Tensor]) -> Record:
    save_file(tensors, directory / tensor_file(0))
    header = Header(cell=cell, session="s", torch="2", substrate="gloo", defect=None)
    return Record(directory, RecordFile(header=header, ranks=msgspec.Raw(msgspec.json.encode([facts]))))
