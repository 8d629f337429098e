"""Policy gradient on answers of a language model (GRPO): advantages in a group, and a pull to a frozen reference.

    conformance judge grpo.py:train

Own loop. Each token counts equally; advantages and the chances of the policy that answered come with the data.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR

from conformance.subjects import LoopConfig, own_loop

VOCAB, DIM, TOKENS, GROUP, LAYERS = 33, 16, 9, 4, 2
LOW, HIGH, PULL = 0.2, 0.28, 0.04
Answers = dict[str, Tensor]


class Layer(nn.Module):
    """Causal attention and network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (answers, tokens, DIM)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return cast("Tensor", x + self.down(F.silu(self.up(self.norm2(x)))))


class Language(nn.Module):
    """Chances of the next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(TOKENS, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.RMSNorm(DIM, eps=1e-5), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logarithm of the chance of each token but the first, (answers, TOKENS - 1)."""
        x = self.embedding(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x[:, :-1])).float()
        return cast("Tensor", logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(-1))


class PolicyAndReference(nn.Module):
    """Language model that learns, and the one from which it must not go far."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Language(), Language()
        self.reference.load_state_dict(self.policy.state_dict())
        self.reference.requires_grad_(False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return both logarithms of chances, (answers, TOKENS - 1) each."""
        with torch.no_grad():
            reference = self.reference(tokens)
        return self.policy(tokens), reference


def answers(generator: torch.Generator) -> Answers:
    """Return a group of answers to a question, whose rewards are compared with each other."""
    reward = torch.rand(GROUP, generator=generator)
    begins, ends = (torch.randint(low, high, (GROUP, 1), generator=generator) for low, high in ((0, 3), (4, TOKENS)))
    index = torch.arange(TOKENS - 1)
    return {
        "tokens": torch.randint(VOCAB, (GROUP, TOKENS), generator=generator),
        "is_answer": (index >= begins) & (index < ends),
        "advantage": (reward - reward.mean()) / (reward.std() + 1e-4),
        "old": -3.5 + 0.3 * torch.randn(GROUP, TOKENS - 1, generator=generator),
    }


def answer_tokens(batch: Answers) -> int:
    """Return the number of tokens of answers."""
    return int(batch["is_answer"].sum())


def clipped_objective(model: nn.Module, batch: Answers) -> Tensor:
    """Return the loss of each token of an answer, summed."""
    chance, reference = model(batch["tokens"])
    ratio, advantage = (chance - batch["old"]).exp(), batch["advantage"][:, None]
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
    away = (reference - chance).exp() - (reference - chance) - 1
    return cast("Tensor", ((PULL * away - gain) * batch["is_answer"]).sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW of the policy."""
    return AdamW([p for p in parameters if p.requires_grad], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)


def make_schedule(optimizer: Optimizer) -> LRScheduler:
    """Return a learning rate that falls twice."""
    return MultiStepLR(optimizer, milestones=[1, 2], gamma=0.5)


@own_loop(
    model=PolicyAndReference,
    loss=clipped_objective,
    batch=answers,
    count=answer_tokens,
    optimizer=make_optimizer,
    scheduler=make_schedule,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Any]]:
    """Train the policy."""
    model = cast("PolicyAndReference", config.model())
    options: dict[str, Any] = {"mesh": config.device_mesh(), "mp_policy": config.mixed_precision}
    for language in (model.policy, model.reference):
        for layer in language.layers:
            fully_shard(layer, **options)
        fully_shard(language, **options)
    sharded: FSDPModule = fully_shard(model, **options)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer)
    for micro_batches in config.steps:
        tokens = torch.tensor(sum(answer_tokens(batch) for batch in micro_batches))
        dist.all_reduce(tokens)
        logged = torch.zeros(())
        for remaining, batch in zip(reversed(range(len(micro_batches))), micro_batches, strict=True):
            sharded.set_is_last_backward(remaining == 0)
            sharded.set_requires_gradient_sync(remaining == 0)
            loss = clipped_objective(model, batch) / tokens
            torch.autograd.backward(loss * dist.get_world_size())
            logged += loss.detach()
        norm = nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], config.max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(logged)
        yield {"loss": logged, "grad_norm": norm}
