"""Script that learns clicks (DLRM): tables of categories in bags, numbers, and products of all pairs of features.

    torchrun --nproc-per-node 2 recommender.py
    conformance judge recommender.py:train

Clicks that were drawn more rarely than they happen have weights; the data come from a DataLoader of the script.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Adagrad, Optimizer
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from conformance.subjects import LoopConfig, own_loop

ROWS, WIDTH, NUMBERS, LONGEST = (41, 13, 6), 8, 5, 4
BATCH_SIZE = 6
Impressions = dict[str, Tensor]


def impressions(generator: torch.Generator, count: int = BATCH_SIZE) -> Impressions:
    """Return bags of categories, of which 0 is padding, numbers, clicks and weights."""
    bags = torch.stack([torch.randint(rows, (count, LONGEST), generator=generator) for rows in ROWS], 1)
    is_click = torch.rand(count, generator=generator) < 0.3
    return {
        "bags": bags * (torch.rand(bags.shape, generator=generator) < 0.7),
        "numbers": torch.randn(count, NUMBERS, generator=generator),
        "clicks": is_click.float(),
        "weights": torch.where(is_click, 1.0, 2.5),
    }


class Log(Dataset[Impressions]):
    """Impressions that were logged."""

    def __len__(self) -> int:
        """Return the number of impressions."""
        return 240

    def __getitem__(self, index: int) -> Impressions:
        """Return one impression."""
        return {name: each[0] for name, each in impressions(torch.Generator().manual_seed(index), 1).items()}


class Recommender(nn.Module):
    """Tables, a network of numbers, and a network of all products of two."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, WIDTH, mode="mean", padding_idx=0) for rows in ROWS)
        self.bottom = nn.Sequential(nn.Linear(NUMBERS, 12), nn.ReLU(), nn.Linear(12, WIDTH), nn.ReLU())
        features = len(ROWS) + 1
        self.top = nn.Sequential(nn.Linear(WIDTH + features * (features - 1) // 2, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, bags: Tensor, numbers: Tensor) -> Tensor:
        """Return the logit of a click, (impressions,)."""
        dense = self.bottom(numbers)
        features = torch.stack([dense, *(table(bags[:, index]) for index, table in enumerate(self.tables))], 1)
        products = features @ features.transpose(1, 2)
        row, column = torch.triu_indices(products.shape[1], products.shape[1], offset=1)
        logits: Tensor = self.top(torch.cat([dense, products[:, row, column]], 1))
        return logits.squeeze(-1)


def click_loss(model: nn.Module, batch: Impressions) -> Tensor:
    """Return the weighted cross entropy, summed over impressions."""
    logits = model(batch["bags"], batch["numbers"])
    return F.binary_cross_entropy_with_logits(logits, batch["clicks"], batch["weights"], reduction="sum")


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adagrad, whose sums of squares do not begin with zero."""
    return Adagrad(parameters, lr=0.02, lr_decay=0.01, initial_accumulator_value=0.1)


def main(mesh: DeviceMesh, *, accumulation: int, max_norm: float) -> Iterator[tuple[float, Tensor]]:
    """Train; yields loss and norm of each step."""
    torch.manual_seed(0)
    model = Recommender()
    fully_shard([*model.tables], mesh=mesh)
    fully_shard(model.top, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    sampler: DistributedSampler[Impressions] = DistributedSampler(Log(), shuffle=True, seed=1)
    batches = iter(DataLoader(Log(), batch_size=BATCH_SIZE, sampler=sampler, drop_last=True))
    while micro_batches := list(islice(batches, accumulation)):
        summed = torch.zeros(())
        for batch in micro_batches:
            loss = click_loss(model, batch) / (len(batch["clicks"]) * accumulation)
            loss.backward()  # type: ignore[no-untyped-call]
            summed += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(summed)
        yield float(summed) / dist.get_world_size(), norm


@own_loop(
    model=Recommender,
    loss=click_loss,
    batch=impressions,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    accumulation="even",
    refuses=lambda cell: "all batches have one size" if cell.uneven else None,
)
def train(config: LoopConfig) -> Iterator[tuple[float, Tensor]]:
    """Train as the script does."""
    return main(config.device_mesh(), accumulation=config.accumulation, max_norm=config.max_norm)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, (mean, _) in enumerate(main(everyone, accumulation=2, max_norm=1.0)):
        print(f"step {number}: loss {mean:.4f}")
    dist.destroy_process_group()
