"""Hugging Face transformers with its native FSDP2, `from_pretrained(..., distributed_config=...)`.

Tried with transformers 5.23.0. https://huggingface.co/docs/transformers/main/en/main_classes/model
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

from conformance.subjects.cells import SubjectCell
from conformance.subjects.decorated import clip_with_torch
from conformance.subjects.loop import DataGroup, Loop
from conformance.subjects.own_loop import LoopConfig
from conformance.subjects.protocol import Batch, LoopedRun, Run
from conformance.subjects.shipped.workload import (
    DIM,
    LAYERS,
    SEQ_LEN,
    VOCAB_SIZE,
    OfDecoder,
    shared_by_rank0,
    token_loss,
)


class TransformersNative(OfDecoder):
    """Llama that transformers loads and shards; the loop is the suite's, clipping is torch's."""

    name = "transformers"
    shims: Sequence[str] = ()
    packages: tuple[str, ...] = ("transformers",)

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the reason for tensor parallelism, and for the meta device, which `from_pretrained` uses by itself."""
        if "tp" in cell.shape:
            return "transformers leaves norms off the tensor-parallel mesh, and clip_grad_norm_ refuses two meshes"
        if cell.offload and cell.device == "cpu":
            return "transformers offloads to pinned memory alone, which needs an accelerator"
        return "from_pretrained makes the model on the meta device by itself" if cell.init == "meta" else None

    def model(self, *, tied: bool) -> nn.Module:
        """Return a small Llama."""
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=DIM,
            intermediate_size=2 * DIM,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQ_LEN,
            use_cache=False,
            tie_word_embeddings=tied,
        )
        model: nn.Module = LlamaForCausalLM(config)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the summed loss."""
        return token_loss(model(input_ids=batch["input_ids"]).logits, batch["labels"])

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> Run | LoopedRun:
        """Load the model sharded, and train it with the suite's loop."""
        model = self.load_sharded(cell)
        data = DataGroup(rank=dist.get_rank(), ranks=cell.data_ranks, copies=1)
        return PretrainedLoop(
            subject=self,
            cell=cell,
            model=model,
            optimizer=self.make_optimizer(model.parameters()),
            loss=self.loss,
            count=self.count,
            clip=lambda parameters: clip_with_torch(parameters, max_norm),
            data=data,
            averaged=True,
            device=device,
            replaced=("clip", "optimizer"),
        )

    def load_sharded(self, cell: SubjectCell) -> nn.Module:
        """Save the model, and load it sharded as the cell says."""
        with tempfile.TemporaryDirectory() as own:
            model = pretrained(self._saved(own, tied=cell.tied), cell)
            dist.barrier()  # until all have read what rank 0 has written
        return model

    def _saved(self, directory: str, *, tied: bool) -> str:
        """Save the model in rank 0's directory, and return that; transformers lets rank 0 write alone."""
        directory = shared_by_rank0(directory)
        model: Any = self.model(tied=tied)
        model.save_pretrained(directory)
        dist.barrier()
        return directory


@dataclass(kw_only=True)
class PretrainedLoop(Loop):
    """Loop whose model is saved and loaded by transformers; the optimizer's state is saved by torch."""

    subject: TransformersNative
    cell: SubjectCell

    def save(self, directory: Path) -> None:
        """Save model and optimizer."""
        model: Any = self.model
        model.save_pretrained(directory / "model")
        state = get_optimizer_state_dict(self.model, self.optimizer)
        save({"optimizer": state}, checkpoint_id=directory / "optimizer")

    def load(self, directory: Path) -> None:
        """Load a new model, and the state of a new optimizer."""
        self.model = pretrained(directory / "model", self.cell)
        self.optimizer = self.subject.make_optimizer(self.model.parameters())
        state = {"optimizer": get_optimizer_state_dict(self.model, self.optimizer)}
        load(state, checkpoint_id=directory / "optimizer")
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state["optimizer"])


def pretrained(directory: str | Path, cell: SubjectCell | LoopConfig) -> nn.Module:
    """Load a model sharded as a cell says."""
    options = DistributedConfig(
        fsdp_size=cell.shape["dp_shard"],
        dp_replicate_size=cell.shape.get("dp_replicate", 1),
        fsdp_mixed_precision=cell.precision == "bf16",
        fsdp_cpu_offload=cell.offload,
    )
    model: nn.Module = LlamaForCausalLM.from_pretrained(directory, distributed_config=options, dtype=torch.float32)
    return model.train()
