"""A script that knows nothing of the suite: it makes model, data, loop and process group itself."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, 50, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def main(max_norm: float = 1.0, accumulation: int = 1) -> list[float]:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    data = TensorDataset(torch.randint(50, (64, 8)), torch.randint(50, (64, 8)))
    losses, total = [], torch.zeros(())
    for _epoch in range(2):
        for index, (tokens, labels) in enumerate(DataLoader(data, batch_size=4)):
            is_last = (index + 1) % accumulation == 0
            model.set_requires_gradient_sync(is_last)
            loss = cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / accumulation
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
            if is_last:
                clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(total)
                losses.append(total.item() / dist.get_world_size())
                total.zero_()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
