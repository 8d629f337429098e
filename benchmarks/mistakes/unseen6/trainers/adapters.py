"""Script that fits a frozen translator to a new language by adapters of low rank (LoRA), with smoothed labels.

    torchrun --nproc-per-node 2 adapters.py
    conformance judge adapters.py:train

The base is frozen but for its table of words, which is also the head if the model is tied. Padding does not count.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer

from conformance.subjects import LoopConfig, own_loop

WORDS, WIDTH, RANK, LONGEST, PADDING = 24, 16, 2, 7, 0
Sentences = dict[str, Tensor]


def sentences(generator: torch.Generator, count: int = 4) -> Sentences:
    """Return padded sentences of two languages."""

    def some() -> Tensor:
        words = torch.randint(1, WORDS, (count, LONGEST), generator=generator)
        ends = torch.randint(3, LONGEST + 1, (count, 1), generator=generator)
        return words.masked_fill(torch.arange(LONGEST) >= ends, PADDING)

    return {"source": some(), "target": some()}


class Adapted(nn.Module):
    """Frozen linear layer with a trained product of two small matrices beside it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, inputs) / inputs**0.5)
        self.up = nn.Parameter(torch.randn(outputs, RANK) / 20)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the base and of the adapter, added up."""
        features: Tensor = self.base(x) + 2.0 * F.linear(F.linear(x, self.down), self.up)
        return features


class Attention(nn.Module):
    """Attention with one head, to the same or to another sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (Adapted(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None, *, causal: bool = False) -> Tensor:
        """Return features of the shape of `x`; `mask` is True where there is a word of `memory`."""
        keys = (self.query(x), self.key(memory), self.value(memory))
        allowed = None if mask is None else mask[:, None, :].expand(-1, x.shape[1], -1)
        attended: Tensor = self.out(F.scaled_dot_product_attention(*keys, attn_mask=allowed, is_causal=causal))
        return attended


class Layer(nn.Module):
    """Layer of the encoder, or of the decoder, which attends to the source as well."""

    def __init__(self, *, decodes: bool) -> None:
        super().__init__()
        self.own = Attention()
        self.other = Attention() if decodes else None
        self.first, self.second = Adapted(WIDTH, 32), Adapted(32, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return features of the shape of `x`; `mask` is that of the source."""
        normed = self.norm(x)
        x = x + self.own(normed, normed, None if self.other else mask, causal=self.other is not None)
        if self.other is not None and memory is not None:
            x = x + self.other(self.norm(x), memory, mask)
        changed: Tensor = x + self.second(F.relu(self.first(self.norm(x))))
        return changed


class Translator(nn.Module):
    """Encoder and decoder over one table of words."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.encoder, self.decoder = (
            nn.ModuleList(Layer(decodes=decodes) for _ in range(2)) for decodes in (False, True)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits of the next words of the target."""
        is_word = source != PADDING
        memory, x = self.table(source), self.table(target)
        for layer in self.encoder:
            memory = layer(memory, is_word)
        for layer in self.decoder:
            x = layer(x, is_word, memory)
        logits: Tensor = self.head(x)
        return logits


def word_loss(model: nn.Module, batch: Sentences) -> Tensor:
    """Return the cross entropy with smoothed labels, summed over words."""
    logits = model(batch["source"], batch["target"][:, :-1])
    return F.cross_entropy(
        logits.flatten(0, 1).float(),
        batch["target"][:, 1:].flatten(),
        ignore_index=PADDING,
        label_smoothing=0.1,
        reduction="sum",
    )


def count_words(batch: Sentences) -> float:
    """Return the number of words that are foretold."""
    return float((batch["target"][:, 1:] != PADDING).sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW for all that is trained."""
    return AdamW((p for p in parameters if p.requires_grad), lr=2e-3, weight_decay=0.01)


def sharded(model: Translator, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> FSDPModule:
    """Shard each layer, then the rest."""
    for layer in (*model.encoder, *model.decoder):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def fit(model: nn.Module, steps: Iterable[list[Sentences]], max_norm: float) -> Iterator[dict[str, Tensor]]:
    """Train; yields loss and norm of each step."""
    optimizer = make_optimizer(model.parameters())
    for micro_batches in steps:
        words = torch.tensor(sum(map(count_words, micro_batches)))
        dist.all_reduce(words)
        loss_sum = torch.zeros(())
        for batch in micro_batches:
            loss = word_loss(model, batch)
            loss_sum += loss.detach()
            loss.mul(dist.get_world_size() / words).backward()  # type: ignore[no-untyped-call]
        norm = clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss_sum)
        yield {"loss": loss_sum / words, "grad_norm": norm}


@own_loop(
    model=Translator,
    tied_model=partial(Translator, tied=True),
    loss=word_loss,
    batch=sentences,
    count=count_words,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Tensor]]:
    """Train as the script does."""
    model = config.model()
    assert isinstance(model, Translator)
    sharded(model, config.device_mesh(), config.mixed_precision)
    yield from fit(model, config.steps, config.max_norm)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1 + dist.get_rank())
    script = Translator(tied=True)
    sharded(script, init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy())
    for found in fit(script, ([sentences(source)] for _ in range(8)), 1.0):
        print(float(found["loss"]))
    dist.destroy_process_group()
