"""Plain script with an own loop and a DataLoader, in the style of a tutorial.

    torchrun --nproc-per-node 2 benchmarks/mistakes/trainers/script.py
    conformance judge benchmarks/mistakes/trainers/script.py:train

A tagger of sequences of unequal length: the loss is the mean over all tokens that are no padding, on all ranks.
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from conformance.subjects import LoopConfig, own_loop

WORDS, TAGS, WIDTH, LONGEST = 50, 7, 20, 9
STEPS, BATCH_SIZE, MAX_NORM = 3, 4, 0.1
PADDING = -100


class Sentences(Dataset[tuple[Tensor, Tensor]]):
    """Sentences with a tag for each word."""

    def __len__(self) -> int:
        """Return the number of sentences."""
        return 128

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return words and tags, each (LONGEST,); tags behind the end are PADDING."""
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(1, WORDS, (LONGEST,), generator=generator)
        length = int(torch.randint(2, LONGEST + 1, (), generator=generator))
        is_word = torch.arange(LONGEST) < length
        return words * is_word, (words % TAGS).masked_fill(~is_word, PADDING)


class Tagger(nn.Module):
    """Embedding, convolutions over neighbours, and a tag for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.convolutions = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.tags = nn.Linear(WIDTH, TAGS + 1)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits (samples, words, TAGS + 1)."""
        x = self.embedding(words)
        for convolution in self.convolutions:
            x = x + F.gelu(convolution(x.transpose(1, 2))).transpose(1, 2)
        return cast("Tensor", self.tags(self.norm(x)))


class Training(NamedTuple):
    """Model, optimizer and data of a rank."""

    model: Tagger
    optimizer: torch.optim.Optimizer
    loader: DataLoader[tuple[Tensor, Tensor]]


def setup() -> Training:
    """Make the model, shard it, and make optimizer and DataLoader."""
    torch.manual_seed(0)
    model = Tagger()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for convolution in model.convolutions:
        fully_shard(convolution, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler: DistributedSampler[tuple[Tensor, Tensor]] = DistributedSampler(Sentences(), shuffle=False)
    return Training(model, optimizer, DataLoader(Sentences(), batch_size=BATCH_SIZE, sampler=sampler))


def total(number: float) -> float:
    """Return the sum of a number over all ranks."""
    summed = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(summed)
    return float(summed)


def tag_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross entropy of words and tags, summed over words."""
    words, tags = batch
    logits = model(words)
    return F.cross_entropy(logits.flatten(0, 1), tags.flatten(), ignore_index=PADDING, reduction="sum")


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Train on the micro-batches of a step; returns the mean loss of a word."""
    words_in_step = total(sum(int((tags != PADDING).sum()) for _, tags in batches))
    loss_sum = torch.zeros(())
    for index, batch in enumerate(batches):
        cast("FSDPModule", model).set_requires_gradient_sync(index == len(batches) - 1)
        loss = tag_loss(model, batch)
        (loss / words_in_step * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
        loss_sum += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return total(float(loss_sum)) / words_in_step


def main(accumulation: int = 2) -> Iterator[float]:
    """Train; yields the loss of each step."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model, optimizer, loader = setup()
    batches = iter(loader)
    for _ in range(STEPS):
        yield train_step(model, optimizer, [next(batches) for _ in range(accumulation)])


def sentences(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return words and tags as the DataLoader does."""
    chosen = torch.randint(1000, (BATCH_SIZE,), generator=generator).tolist()
    words, tags = zip(*(Sentences()[index] for index in chosen), strict=True)
    return torch.stack(words), torch.stack(tags)


@own_loop(
    model=Tagger,
    loss=tag_loss,
    batch=sentences,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    max_norm=MAX_NORM,
    accumulation="even",
)
def train(config: LoopConfig) -> Iterator[float]:
    """Train as the script does."""
    return main(config.accumulation)


if __name__ == "__main__":
    for number, loss in enumerate(main()):
        print(f"step {number}: loss {loss:.4f}")
    dist.destroy_process_group()
