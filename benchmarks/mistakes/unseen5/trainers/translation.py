"""Translation: encoder and decoder with cross attention, padded sentences, smoothed labels, and a shared vocabulary.

conformance judge translation.py:parallelize
"""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Adam, Optimizer

from conformance.subjects import ParallelConfig, subject

VOCABULARY, WIDTH, HEADS, LONGEST, START, PAD = 30, 16, 2, 9, 1, 0
Sentences = dict[str, Tensor]


def sentences(generator: torch.Generator, count: int = 4) -> Sentences:
    """Return source, target from its start on, and the target's next words as labels."""
    found = []
    for _ in range(2):
        length = torch.randint(3, LONGEST + 1, (count, 1), generator=generator)
        words = torch.randint(2, VOCABULARY, (count, LONGEST), generator=generator)
        found.append(words.masked_fill(torch.arange(LONGEST) >= length, PAD))
    source, target = found
    start = torch.full((count, 1), START)
    return {
        "source": source,
        "target": torch.cat([start, target[:, :-1]], 1),
        "labels": target.masked_fill(target == PAD, -100),
    }


class Attention(nn.Module):
    """Attention of one sentence to itself or to another one."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Return features of the shape of `x`; `mask` is true for words that may be seen."""
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = self.memory(memory).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return cast("Tensor", self.out(mixed.transpose(1, 2).flatten(2)))


class Layer(nn.Module):
    """Attention, in a decoder attention to the source as well, and a network."""

    def __init__(self, *, crosses: bool) -> None:
        super().__init__()
        self.own, self.own_norm = Attention(), nn.LayerNorm(WIDTH)
        self.cross = Attention() if crosses else None
        self.cross_norm = nn.LayerNorm(WIDTH) if crosses else None
        self.network = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(
        self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        """Return features of the shape of `x`, normed after each part."""
        x = self.own_norm(x + self.own(x, x, mask))
        if self.cross is not None and self.cross_norm is not None:
            x = self.cross_norm(x + self.cross(x, memory, memory_mask))
        return cast("Tensor", self.norm(x + self.network(x)))


class Translator(nn.Module):
    """Encoder, decoder and head; all three may have one table of words."""

    angles: Tensor

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Layer(crosses=False) for _ in range(2))
        self.decoder = nn.ModuleList(Layer(crosses=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("angles", torch.empty(LONGEST, WIDTH), persistent=False)
        if is_tied:
            self.target.weight = self.head.weight = self.source.weight
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Fill the table of positions."""
        places = torch.arange(LONGEST)[:, None] / 10 ** torch.linspace(0, 3, WIDTH // 2)
        with torch.no_grad():
            self.angles.copy_(torch.cat([places.sin(), places.cos()], 1))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits of the target's next words."""
        seen = (source != PAD)[:, None, None]
        memory = self.source(source) + self.angles
        for layer in self.encoder:
            memory = layer(memory, seen)
        causal = torch.ones(LONGEST, LONGEST, dtype=torch.bool, device=target.device).tril()
        x = self.target(target) + self.angles
        for layer in self.decoder:
            x = layer(x, causal, memory, seen)
        logits: Tensor = self.head(x)
        return logits


def word_loss(model: nn.Module, batch: Sentences) -> Tensor:
    """Return the cross entropy with smoothed labels, summed over words."""
    logits = model(batch["source"], batch["target"]).flatten(0, 1).float()
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum", label_smoothing=0.1)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adam as the first transformer had it."""
    return Adam(parameters, lr=2e-3, betas=(0.9, 0.98), eps=1e-9)


def initialize(model: nn.Module) -> None:
    """Initialise layers and buffer after the model was made on the meta device."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.reset_parameters()
    cast("Translator", model).reset_buffers()


def save(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Save the shards of all ranks."""
    weights, state = get_state_dict(model, optimizer)
    state_dict_saver.save({"model": weights, "optimizer": state}, checkpoint_id=directory)


def load(model: nn.Module, optimizer: Optimizer, directory: Path) -> None:
    """Load the files of `save`."""
    weights, state = get_state_dict(model, optimizer)
    state_dict_loader.load({"model": weights, "optimizer": state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)


def shard(model: Translator, mesh: DeviceMesh, mixed: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
    """Shard each layer of both, and tables and head as one group."""
    layers = [*model.encoder, *model.decoder]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    fully_shard(model, mesh=mesh, mp_policy=mixed, offload_policy=offload)
    for layer, following in pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])


@subject(
    model=Translator,
    loss=word_loss,
    batch=sentences,
    optimizer=make_optimizer,
    initialize=initialize,
    tied_model=lambda: Translator(is_tied=True),
    save=save,
    load=load,
    offload=True,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: Translator, mesh: DeviceMesh, config: ParallelConfig) -> Translator:
    """Shard the translator as its training does."""
    offload = CPUOffloadPolicy(pin_memory=config.pin_memory) if config.offload else OffloadPolicy()
    shard(model, mesh, config.mixed_precision, offload)
    return model
