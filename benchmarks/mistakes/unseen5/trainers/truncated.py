"""Script that learns characters by a recurrent network (GRU) with truncated backpropagation through time.

    torchrun --nproc-per-node 2 truncated.py
    conformance judge truncated.py:train

A text is read window by window. Each window has a forward and a backward pass of its own; its last state, detached, is
the first one of the next. All windows of all micro-batches add to one step.
"""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import SGD, Optimizer

from conformance.subjects import LoopConfig, own_loop

CHARACTERS, WIDTH, LENGTH, WINDOW = 20, 16, 12, 4
Texts = dict[str, Tensor]


def texts(generator: torch.Generator, count: int = 3) -> Texts:
    """Return characters and the following ones, which do not count after the end of a text."""
    characters = torch.randint(CHARACTERS, (count, LENGTH + 1), generator=generator)
    lengths = torch.randint(WINDOW + 1, LENGTH + 1, (count, 1), generator=generator)
    labels = characters[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, -100)
    return {"characters": characters[:, :-1].contiguous(), "labels": labels}


class Reader(nn.Module):
    """Recurrent network of characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, characters: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits, (texts, characters, vocabulary), and the last state."""
        outputs, state = self.recurrent(self.embedding(characters), state)
        return self.head(self.norm(outputs)), cast("Tensor", state)


def window_losses(model: nn.Module, batch: Texts) -> Iterator[Tensor]:
    """Yield the summed loss of each window; the state goes on without its history."""
    state = None
    windows = (torch.split(batch[name], WINDOW, 1) for name in ("characters", "labels"))
    for characters, labels in zip(*windows, strict=True):
        logits, state = model(characters, state)
        state = state.detach()
        yield F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def text_loss(model: nn.Module, batch: Texts) -> Tensor:
    """Return the loss of all characters that count, summed over windows."""
    return torch.stack([*window_losses(model, batch)]).sum()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return SGD with Nesterov's momentum."""
    return SGD(parameters, lr=0.3, momentum=0.8, nesterov=True, weight_decay=1e-3)


def train_steps(
    model: nn.Module, mesh: DeviceMesh, steps: Iterable[list[Texts]], max_norm: float
) -> Iterator[tuple[float, Tensor]]:
    """Train; yields the loss for each character and the norm of each step."""
    assert isinstance(model, Reader)
    fully_shard(model.recurrent, mesh=mesh, reshard_after_forward=False)
    sharded: FSDPModule = fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    for micro_batches in steps:
        counted = torch.tensor(sum(int((batch["labels"] != -100).sum()) for batch in micro_batches))
        dist.all_reduce(counted)
        scale = dist.get_world_size() / counted
        total = torch.zeros(())
        for index, batch in enumerate(micro_batches):
            windows = LENGTH // WINDOW
            for window, loss in enumerate(window_losses(model, batch)):
                is_last = index == len(micro_batches) - 1 and window == windows - 1
                sharded.set_requires_gradient_sync(is_last)
                (loss * scale).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        yield float(total / counted), norm


@own_loop(model=Reader, loss=text_loss, batch=texts, optimizer=make_optimizer, meshes=["dp2", "hsdp2x2"])
def train(config: LoopConfig) -> Iterator[tuple[float, Tensor]]:
    """Train as the script does."""
    return train_steps(config.model(), config.device_mesh(), config.steps, config.max_norm)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1 + dist.get_rank())
    data = [[texts(source) for _ in range(2)]] * 8
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, (mean, norm) in enumerate(train_steps(Reader(), everyone, data, 1.0)):
        print(f"step {number}: loss {mean:.4f}, norm {float(norm):.3f}")
    dist.destroy_process_group()
