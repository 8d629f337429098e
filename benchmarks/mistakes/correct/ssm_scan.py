"""State-space model whose scan is a custom autograd function, with an own loop over all steps and averaged weights."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import SGD, Optimizer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import StepObserver

DIM, STATE, TOKENS, VOCAB, DECAY = 12, 10, 9, 25, 0.9
Text = dict[str, Tensor]


class Scan(torch.autograd.Function):
    """States h[t] = a[t] h[t - 1] + b[t], and their gradients by a scan in the other direction."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """Return states of the shape of `a` and `b`, (samples, tokens, features)."""
        state, states = torch.zeros_like(b[:, 0]), []
        for token in range(b.shape[1]):
            state = a[:, token] * state + b[:, token]
            states.append(state)
        result = torch.stack(states, 1)
        ctx.save_for_backward(a, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `a` and `b`."""
        a, states = ctx.saved_tensors
        carried, grads = torch.zeros_like(grad[:, 0]), []
        for token in reversed(range(grad.shape[1])):
            carried = grad[:, token] + carried
            grads.append(carried)
            carried = carried * a[:, token]
        grad_b = torch.stack(grads[::-1], 1)
        before = F.pad(states, (0, 0, 1, 0))[:, :-1]
        return grad_b * before, grad_b


class Mixer(nn.Module):
    """Selective scan between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.inputs, self.decay = nn.Linear(DIM, 2 * STATE), nn.Linear(DIM, STATE)
        self.skip = nn.Parameter(torch.ones(STATE))
        self.outputs = nn.Linear(STATE, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Return tokens of the shape of `x`, (samples, tokens, DIM)."""
        y = self.norm(x)
        value, gate = self.inputs(y).chunk(2, -1)
        decay = self.decay(y).sigmoid()
        states = Scan.apply(decay, value * (1 - decay))  # type: ignore[no-untyped-call]
        return cast("Tensor", x + self.outputs((states + self.skip * value) * F.silu(gate)))


class StateSpaceModel(nn.Module):
    """Embedding, mixers and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (samples, tokens, VOCAB)."""
        x = self.embedding(tokens)
        for mixer in self.mixers:
            x = mixer(x)
        return cast("Tensor", self.head(x))


def text_loss(model: nn.Module, text: Text) -> Tensor:
    """Return the summed cross entropy, weighted by sample."""
    losses = F.cross_entropy(model(text["tokens"]).transpose(1, 2), text["next"], reduction="none")
    return (losses.sum(1) * text["weight"]).sum()


class LoopOverSteps:
    """One rank that takes all steps in one call."""

    def __init__(self, model: StateSpaceModel, optimizer: Optimizer, *, max_norm: float) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self.average = [parameter.detach().clone() for parameter in model.parameters()]

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return dist.get_rank()

    def train(self, steps: Sequence[Sequence[Text]], observer: StepObserver) -> list[float]:
        """Train, and average weights after each step; returns the losses."""
        return [self.train_step(number, texts, observer) for number, texts in enumerate(steps)]

    def train_step(self, step: int, texts: Sequence[Text], observer: StepObserver) -> float:
        """Train a step whose samples count equally; each reduction is divided by the micro-batches."""
        samples = torch.tensor(float(sum(len(text["tokens"]) for text in texts)))
        dist.all_reduce(samples)
        logged = torch.zeros((), dtype=torch.float64)
        for text in texts:
            observer.phase("forward", step=step)
            loss = text_loss(self.model, text) / samples
            observer.phase("backward", step=step)
            (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
            logged += loss.detach()
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        observer.phase("idle", step=step)
        with torch.no_grad():
            for average, parameter in zip(self.average, self.model.parameters(), strict=True):
                average.lerp_(parameter, 1 - DECAY)
        dist.all_reduce(logged)
        return float(logged)


class StateSpace:
    """The trainer for `conformance judge`."""

    name = "state-space"
    shims: Sequence[str] = ()

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch."""
        return {"torch": str(torch.__version__)}

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return why a cell cannot be run, or None."""
        is_plain = cell.init == "full" and not (cell.tied or cell.resumed or cell.offload or "tp" in cell.shape)
        return None if is_plain else "the loop has no such option"

    def model(self, *, tied: bool) -> nn.Module:
        """Return the model."""
        return StateSpaceModel()

    def batch(self, generator: torch.Generator) -> Text:
        """Return tokens, the next ones, and a weight for each sample."""
        tokens = torch.randint(VOCAB, (4, TOKENS + 1), generator=generator)
        return {"tokens": tokens[:, :-1], "next": tokens[:, 1:], "weight": torch.rand(4, generator=generator) + 0.5}

    def loss(self, model: nn.Module, batch: Text) -> Tensor:
        """Return the loss."""
        return text_loss(model, batch)

    def count(self, batch: Text) -> int:
        """Return the number of samples."""
        return len(batch["tokens"])

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return SGD with Nesterov's momentum."""
        return SGD(parameters, lr=0.05, momentum=0.9, nesterov=True)

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> LoopOverSteps:
        """Shard each mixer."""
        model = StateSpaceModel()
        mesh = init_device_mesh(device.type, tuple(cell.shape.values()), mesh_dim_names=tuple(cell.shape))
        param_dtype = torch.bfloat16 if cell.precision == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
        for mixer in model.mixers:
            fully_shard(mixer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype, torch.float32))
        fully_shard([model.embedding, model.head], mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return LoopOverSteps(model, self.make_optimizer(model.parameters()), max_norm=max_norm)
