"""Preference optimisation (DPO): a policy, and a frozen reference model beside it.

conformance judge dpo.py:parallelize
"""

from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from conformance.subjects import subject

VOCAB, DIM, TOKENS, BETA = 27, 16, 8, 0.5
Pairs = dict[str, Tensor]


class Block(nn.Module):
    """Causal mean over the tokens before, and a gated network."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix, self.gate, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of `x`, (samples, tokens, DIM)."""
        y = self.norm(x)
        number = torch.arange(1, y.shape[1] + 1, dtype=y.dtype)[:, None]
        return cast("Tensor", x + self.down(F.silu(self.gate(self.mix(y).cumsum(1) / number))))


class Language(nn.Module):
    """Language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor, is_answer: Tensor) -> Tensor:
        """Return the log probability of each answer, (samples,); tokens and the mask are (samples, TOKENS)."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        log_probabilities = self.head(x).float().log_softmax(-1)
        chosen = log_probabilities.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        return cast("Tensor", (chosen * is_answer[:, 1:]).sum(-1))


class PolicyAndReference(nn.Module):
    """Policy, which is trained, and reference, which is not."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.reference = Language(), Language()
        self.reference.requires_grad_(False)

    def forward(self, tokens: Tensor, is_answer: Tensor) -> Tensor:
        """Return how much more likely each answer is by the policy than by the reference, as a logarithm."""
        with torch.no_grad():
            expected = self.reference(tokens, is_answer)
        return cast("Tensor", self.policy(tokens, is_answer) - expected)


def pairs(generator: torch.Generator) -> Pairs:
    """Return preferred and rejected answers to one prompt each, of unequal length."""
    prompt = torch.randint(VOCAB, (4, 2), generator=generator)

    def answers() -> tuple[Tensor, Tensor]:
        tokens = torch.cat([prompt, torch.randint(VOCAB, (4, TOKENS - 2), generator=generator)], 1)
        ends = torch.randint(3, TOKENS + 1, (4, 1), generator=generator)
        position = torch.arange(TOKENS)
        return tokens, (position >= 2) & (position < ends)

    (chosen, is_chosen), (rejected, is_rejected) = answers(), answers()
    return {"chosen": chosen, "is_chosen": is_chosen, "rejected": rejected, "is_rejected": is_rejected}


def preference_loss(model: nn.Module, data: Pairs) -> Tensor:
    """Return the loss of all pairs, summed; both answers go through the model in one batch."""
    tokens = torch.cat([data["chosen"], data["rejected"]])
    gains = model(tokens, torch.cat([data["is_chosen"], data["is_rejected"]]))
    chosen, rejected = gains.chunk(2)
    return -F.logsigmoid(BETA * (chosen - rejected)).sum()


def make_optimizer(parameters: Any) -> AdamW:
    """Return AdamW over the parameters that are trained."""
    return AdamW([parameter for parameter in parameters if parameter.requires_grad], lr=2e-3)


@subject(
    model=PolicyAndReference,
    loss=preference_loss,
    batch=pairs,
    count=lambda data: len(data["chosen"]),
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
)
def parallelize(model: PolicyAndReference, mesh: DeviceMesh, config: Any) -> tuple[nn.Module, AdamW]:
    """Shard both models, each with groups below the root."""
    for language in (model.policy, model.reference):
        for block in language.blocks:
            fully_shard(block, mesh=mesh, mp_policy=config.mixed_precision)
        fully_shard(language, mesh=mesh, mp_policy=config.mixed_precision)
    fully_shard(model, mesh=mesh, mp_policy=config.mixed_precision)
    return model, make_optimizer(model.parameters())
