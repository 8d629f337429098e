"""Hypernetwork: from a task's code it makes the weights of the small network that answers the task's questions.

conformance judge hypernetwork.py:parallelize
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from conformance.subjects import ParallelConfig, subject

TASKS, CODE, INPUTS, HIDDEN, OUTPUTS, QUESTIONS = 9, 8, 4, 6, 3, 5
SHAPES = {"inner.weight": (HIDDEN, INPUTS), "inner.bias": (HIDDEN,), "outer.weight": (OUTPUTS, HIDDEN)}
Tasks = dict[str, Any]


class Answers(nn.Module):
    """Network without parameters, whose weights are made elsewhere."""

    def forward(self, weights: Mapping[str, Tensor], questions: Tensor) -> Tensor:
        """Return answers (tasks, questions, OUTPUTS) by weights whose first dimension is tasks."""
        hidden = torch.baddbmm(weights["inner.bias"][:, None], questions, weights["inner.weight"].transpose(1, 2))
        return torch.einsum("tqh,toh->tqo", F.softplus(hidden), weights["outer.weight"])


class HyperNetwork(nn.Module):
    """Codes of tasks, a trunk, and a head for each tensor of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(TASKS, CODE)
        self.trunk = nn.ModuleList(nn.Sequential(nn.Linear(CODE, CODE), nn.SiLU()) for _ in range(2))
        self.heads = nn.ModuleDict(
            {name.replace(".", "_"): nn.Linear(CODE, torch.Size(shape).numel()) for name, shape in SHAPES.items()}
        )
        self.base = nn.ParameterDict(
            {name.replace(".", "_"): torch.randn(shape) * 0.5 for name, shape in SHAPES.items()}
        )
        self.answers = Answers()

    def forward(self, task: Tensor, questions: Tensor) -> Tensor:
        """Return answers (tasks, questions, OUTPUTS)."""
        code = self.codes(task)
        for layer in self.trunk:
            code = code + layer(code)
        weights = {}
        for name, shape in SHAPES.items():
            key = name.replace(".", "_")
            weights[name] = self.base[key] + 0.1 * self.heads[key](code).unflatten(-1, shape)
        return cast("Tensor", self.answers(weights, questions))


def tasks(generator: torch.Generator) -> Tasks:
    """Return tasks with some questions each; the inputs are nested as the data set has them."""
    return {
        "task": torch.randint(TASKS, (6,), generator=generator),
        "support": {
            "questions": torch.randn(6, QUESTIONS, INPUTS, generator=generator),
            "answers": torch.randint(OUTPUTS, (6, QUESTIONS), generator=generator),
        },
    }


def task_loss(model: nn.Module, batch: Tasks) -> Tensor:
    """Return the cross entropy of answers, as a mean over the questions of each task, and summed over tasks."""
    logits = model(batch["task"], batch["support"]["questions"]).float()
    return F.cross_entropy(logits.transpose(1, 2), batch["support"]["answers"], reduction="none").mean(1).sum()


@subject(
    model=HyperNetwork,
    loss=task_loss,
    batch=tasks,
    count=lambda batch: len(batch["task"]),
    optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=4e-3, weight_decay=0.01, decoupled_weight_decay=True),
    mesh_names={"dp_replicate": "replicate", "dp_shard": "shard"},
    meshes=["dp2", "hsdp2x2"],
    precisions=["fp32", "bf16"],
    offload=True,
)
def parallelize(model: HyperNetwork, mesh: DeviceMesh, config: ParallelConfig) -> nn.Module:
    """Shard trunk and heads, and all that is left with the root."""
    for layer in model.trunk:
        fully_shard(layer, mesh=mesh, **config.policies)
    fully_shard([*model.heads.values()], mesh=mesh, **config.policies)
    fully_shard(model, mesh=mesh, **config.policies)
    return model
