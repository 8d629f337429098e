"""Script that learns preferences of answers (DPO): a policy, and the frozen reference that it began as.

    torchrun --nproc-per-node 2 preference.py
    conformance judge preference.py:train

Answers that were chosen and rejected are computed in one forward pass. Activations that backward needs wait in the
memory of the host. RMSprop and a linear rise of the learning rate are those of the paper's code.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR

from conformance.subjects import LoopConfig, own_loop

VOCABULARY, WIDTH, HEADS, LENGTH, BETA, SMOOTHING = 24, 16, 2, 10, 0.5, 0.1
Pairs = dict[str, Tensor]


def pairs(generator: torch.Generator, count: int = 3) -> Pairs:
    """Return answers to the same prompt that were chosen and rejected, and which tokens are of the answer."""
    prompt = torch.randint(3, 5, (count, 1), generator=generator)
    found = {}
    for name in ("chosen", "rejected"):
        end = torch.randint(6, LENGTH + 1, (count, 1), generator=generator)
        found[name] = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
        found[f"{name}_answer"] = (torch.arange(LENGTH) >= prompt) & (torch.arange(LENGTH) < end)
    found["rejected"] = torch.where(torch.arange(LENGTH) < prompt, found["chosen"], found["rejected"])
    return found


class Block(nn.Module):
    """Causal attention and a gated network, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.network_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        features = self.network_norm(x)
        return x + cast("Tensor", self.down(F.silu(self.gate(features)) * self.up(features)))


class Decoder(nn.Module):
    """Language model that scores answers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, is_answer: Tensor) -> Tensor:
        """Return the logarithm of each answer's probability, (answers,)."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x))[:, :-1].float().log_softmax(-1)
        chosen: Tensor = scores.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return (chosen * is_answer[:, 1:]).sum(-1)


class Alignment(nn.Module):
    """Policy with its reference."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Decoder(), Decoder()
        self.reference.load_state_dict(self.policy.state_dict())
        self.reference.requires_grad_(False)

    def forward(self, tokens: Tensor, is_answer: Tensor) -> Tensor:
        """Return by how much the policy prefers each answer more than the reference does."""
        with torch.no_grad():
            known: Tensor = self.reference(tokens, is_answer)
        return cast("Tensor", self.policy(tokens, is_answer)) - known


def preference_loss(model: nn.Module, batch: Pairs) -> Tensor:
    """Return the loss with smoothed preferences, summed over pairs."""
    tokens = torch.cat([batch["chosen"], batch["rejected"]])
    chosen, rejected = model(tokens, torch.cat([batch["chosen_answer"], batch["rejected_answer"]])).chunk(2)
    margin = BETA * (chosen - rejected)
    return -((1 - SMOOTHING) * F.logsigmoid(margin) + SMOOTHING * F.logsigmoid(-margin)).sum()


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return RMSprop of the parameters that are trained."""
    return RMSprop([p for p in parameters if p.requires_grad], lr=2e-3)


def make_schedule(optimizer: Optimizer) -> LambdaLR:
    """Return a linear rise over four steps."""
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


def train_steps(
    model: nn.Module, mesh: DeviceMesh, steps: Iterable[list[Pairs]], max_norm: float, policy: MixedPrecisionPolicy
) -> Iterator[dict[str, Any]]:
    """Train; yields loss and norm of each step."""
    assert isinstance(model, Alignment)
    for decoder in (model.policy, model.reference):
        for block in decoder.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(decoder, mesh=mesh, mp_policy=policy)
    sharded: FSDPModule = fully_shard(model, mesh=mesh, mp_policy=policy)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(trained)
    schedule = make_schedule(optimizer)
    for micro_batches in steps:
        sums = torch.tensor([0.0, sum(len(batch["chosen"]) for batch in micro_batches)])
        count = sums[1:].clone()
        dist.all_reduce(count)
        for index, batch in enumerate(micro_batches):
            sharded.set_requires_gradient_sync(index == len(micro_batches) - 1)
            with save_on_cpu():
                loss = preference_loss(model, batch)
            (loss * dist.get_world_size() / count.squeeze()).backward()  # type: ignore[no-untyped-call]
            sums[0] += loss.detach()
        norm = nn.utils.clip_grad_norm_(trained, max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        dist.all_reduce(sums)
        yield {"loss": float(sums[0] / sums[1]), "grad_norm": norm}


@own_loop(
    model=Alignment,
    loss=preference_loss,
    batch=pairs,
    optimizer=make_optimizer,
    scheduler=make_schedule,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train as the script does."""
    return train_steps(config.model(), config.device_mesh(), config.steps, config.max_norm, config.mixed_precision)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1 + dist.get_rank())
    data = [[pairs(source) for _ in range(2)]] * 8
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, told in enumerate(train_steps(Alignment(), everyone, data, 1.0, MixedPrecisionPolicy())):
        print(f"step {number}: {told}")
    dist.destroy_process_group()
