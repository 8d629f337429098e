"""Words in sound: separable convolutions with batch norms that are frozen, squeezed channels, and two kinds of labels.

conformance judge keywords.py:Keywords
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import Optimizer, RAdam

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import StepObserver

BANDS, FRAMES, WORDS, SPEAKERS, WIDTH = 6, 20, 5, 3, 12
Sounds = list[Tensor]


class Separable(nn.Module):
    """Convolution in time, convolution of channels, frozen norm, and a gate by channel."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.time = nn.Conv1d(inputs, inputs, 5, padding=2, groups=inputs, bias=False)
        self.channels = nn.Conv1d(inputs, WIDTH, 1, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH).eval()
        self.norm.running_mean.normal_(0, 0.1)  # type: ignore[union-attr]
        self.norm.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        self.squeeze, self.excite = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor (sounds, WIDTH, frames)."""
        y = F.hardswish(self.norm(self.channels(self.time(x))))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean(-1)))))
        return y * gate[..., None]

    def train(self, mode: bool = True) -> "Separable":
        """Leave the norm as it was trained before."""
        super().train(mode)
        self.norm.eval()
        return self


class KeywordModel(nn.Module):
    """Blocks, and heads for the word and for the speaker."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Separable(inputs) for inputs in (BANDS, WIDTH, WIDTH))
        self.word, self.speaker = nn.Linear(2 * WIDTH, WORDS), nn.Linear(2 * WIDTH, SPEAKERS)

    def forward(self, sounds: Tensor) -> dict[str, Tensor]:
        """Return logits of words and of speakers."""
        x = sounds
        for index, block in enumerate(self.blocks):
            x = x + block(x) if index else block(x)
        pooled = torch.cat([x.mean(-1), x.amax(-1)], -1)
        return {"word": self.word(pooled), "speaker": self.speaker(pooled)}


def sound_loss(model: nn.Module, batch: Sounds) -> Tensor:
    """Return both cross entropies, summed over sounds; many speakers are not known."""
    sounds, word, speaker = batch
    logits = model(sounds)
    loss = F.cross_entropy(logits["word"].float(), word, reduction="sum", label_smoothing=0.05)
    return loss + 0.3 * F.cross_entropy(logits["speaker"].float(), speaker, reduction="sum", ignore_index=-1)


class KeywordRun:
    """One rank that trains."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, max_norm: float) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return dist.get_rank()

    def step(self, step: int, micro_batches: Sequence[Sounds], observer: StepObserver) -> Tensor:
        """Train a step, of whose losses one backward pass is made."""
        count = torch.tensor(sum(len(sounds) for sounds, *_ in micro_batches))
        dist.all_reduce(count)
        observer.phase("forward", step=step)
        loss = torch.stack([sound_loss(self.model, batch) for batch in micro_batches]).sum() / count
        observer.phase("backward", step=step)
        torch.autograd.backward(loss * dist.get_world_size())
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_norm)
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        observer.phase("idle", step=step)
        logged = loss.detach().clone()
        dist.all_reduce(logged)
        return logged


class Keywords:
    """The trainer for `conformance judge`."""

    name = "keywords"
    shims: Sequence[str] = ()

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch."""
        return {"torch": str(torch.__version__)}

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return why a cell cannot be run, or None."""
        if cell.init == "meta" or cell.tied or cell.resumed or cell.offload or "tp" in cell.shape:
            return "not written"
        return "several micro-batches are one backward pass" if max(cell.accumulation) > 1 else None

    def model(self, *, tied: bool) -> nn.Module:
        """Return the model."""
        return KeywordModel()

    def batch(self, generator: torch.Generator) -> Sounds:
        """Return sounds, words and speakers."""
        speaker = torch.randint(SPEAKERS, (6,), generator=generator)
        return [
            torch.randn(6, BANDS, FRAMES, generator=generator),
            torch.randint(WORDS, (6,), generator=generator),
            speaker.masked_fill(torch.rand(6, generator=generator) < 0.4, -1),
        ]

    def loss(self, model: nn.Module, batch: Sounds) -> Tensor:
        """Return the loss."""
        return sound_loss(model, batch)

    def count(self, batch: Sounds) -> int:
        """Return the number of sounds."""
        return len(batch[0])

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return RAdam."""
        return RAdam(parameters, lr=3e-3, weight_decay=0.01)

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> KeywordRun:
        """Shard blocks and heads."""
        model = KeywordModel()
        mesh = init_device_mesh(device.type, tuple(cell.shape.values()), mesh_dim_names=tuple(cell.shape))
        param_dtype = torch.bfloat16 if cell.precision == "bf16" else None
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype, torch.float32)}
        for block in model.blocks:
            fully_shard(
                block.get_submodule("norm"), mesh=mesh
            )  # torch refuses a batch norm whose weights alone are in bf16
            fully_shard(block, **options)
        fully_shard([model.word, model.speaker], **options)
        fully_shard(model, **options)
        return KeywordRun(model, self.make_optimizer(model.parameters()), max_norm=max_norm)
