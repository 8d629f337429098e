"""Translation by an encoder and a decoder, with an own loop; both embeddings and the head are one weight.

Gradients of all but the last micro-batch of a step stay unreduced, and parameters stay gathered between its passes.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Adam, Optimizer

from conformance.subjects.cells import SubjectCell
from conformance.subjects.protocol import StepObserver

VOCAB, DIM, HEADS, SOURCE, TARGET, PAD = 36, 16, 2, 8, 6, 0
SMOOTHING = 0.1
Pairs = tuple[Tensor, Tensor, Tensor]


class Translator(nn.Module):
    """Encoder and decoder of torch, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, DIM), nn.Embedding(VOCAB, DIM)
        self.positions = nn.Parameter(torch.randn(max(SOURCE, TARGET), DIM) * 0.1)
        options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, **options) for _ in range(2))
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(DIM, HEADS, 2 * DIM, **options) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.target.weight = self.head.weight = self.source.weight

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits (samples, TARGET, VOCAB) of the tokens behind each of `target`."""
        is_padding = source == PAD
        memory = self.source(source) + self.positions[: source.shape[1]]
        for encoder in self.encoder:
            memory = encoder(memory, src_key_padding_mask=is_padding)
        x = self.target(target) + self.positions[: target.shape[1]]
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        for decoder in self.decoder:
            x = decoder(x, memory, tgt_mask=later, memory_key_padding_mask=is_padding)
        return cast("Tensor", self.head(self.norm(x)))


def smoothed(model: nn.Module, batch: Pairs) -> Tensor:
    """Return the summed cross entropy with smoothed labels."""
    source, target, labels = batch
    logits = model(source, target).flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum", ignore_index=PAD, label_smoothing=SMOOTHING)


class TranslationRun:
    """One rank that trains."""

    def __init__(self, model: Translator, optimizer: Optimizer, *, max_norm: float) -> None:
        self.model, self.optimizer, self.max_norm = model, optimizer, max_norm
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]

    @property
    def data_rank(self) -> int:
        """Index of this rank among those with different data."""
        return dist.get_rank()

    @contextmanager
    def accumulating(self) -> Any:
        """Open a context in which gradients are not reduced, and parameters stay gathered."""
        for module in self.modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        yield
        for module in self.modules:
            module.set_requires_gradient_sync(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)

    def step(self, step: int, micro_batches: Sequence[Pairs], observer: StepObserver) -> float:
        """Train a step."""
        sums = torch.zeros(2, dtype=torch.float64)
        sums[0] = sum(int((labels != PAD).sum()) for *_, labels in micro_batches)
        dist.all_reduce(sums[0])
        scale = dist.get_world_size() / float(sums[0])
        for batch in micro_batches[:-1]:
            with self.accumulating():
                sums[1] += self.pass_through(batch, scale, observer, step)
        sums[1] += self.pass_through(micro_batches[-1], scale, observer, step)
        observer.gradients(self.model, step=step)
        observer.phase("clip", step=step)
        norm = nn.utils.get_total_norm([cast("Tensor", p.grad) for p in self.model.parameters()], foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.max_norm, norm)
        observer.clipped(self.model, norm=norm, step=step)
        observer.phase("optimizer", step=step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        observer.phase("idle", step=step)
        dist.all_reduce(sums[1])
        return float(sums[1] / sums[0])

    def pass_through(self, batch: Pairs, scale: float, observer: StepObserver, step: int) -> float:
        """Add the gradients of a micro-batch; returns its summed loss."""
        observer.phase("forward", step=step)
        loss = smoothed(self.model, batch)
        observer.phase("backward", step=step)
        torch.autograd.backward(loss * scale)
        return float(loss.detach())


class Translation:
    """The trainer for `conformance judge`."""

    name = "translation"
    shims: Sequence[str] = ()

    def versions(self) -> Mapping[str, str]:
        """Return the version of torch."""
        return {"torch": str(torch.__version__)}

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return why a cell cannot be run, or None."""
        if cell.init == "meta" or cell.resumed or cell.offload or "tp" in cell.shape or cell.precision == "bf16":
            return "not written"
        return None

    def model(self, *, tied: bool) -> nn.Module:
        """Return the model, which is tied anyway."""
        return Translator()

    def batch(self, generator: torch.Generator) -> Pairs:
        """Return source, target and labels, with padding at the ends."""
        source = torch.randint(1, VOCAB, (4, SOURCE), generator=generator)
        target = torch.randint(1, VOCAB, (4, TARGET + 1), generator=generator)
        ends = torch.randint(2, SOURCE + 1, (4, 1), generator=generator)
        source = source * (torch.arange(SOURCE) < ends)
        labels = target[:, 1:] * (torch.arange(TARGET) < torch.randint(1, TARGET + 1, (4, 1), generator=generator))
        return source, target[:, :-1], labels

    def loss(self, model: nn.Module, batch: Pairs) -> Tensor:
        """Return the loss."""
        return smoothed(model, batch)

    def count(self, batch: Pairs) -> int:
        """Return the number of labels that are no padding."""
        return int((batch[2] != PAD).sum())

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return Adam as in the paper on attention."""
        return Adam(parameters, lr=1e-3, betas=(0.9, 0.98), eps=1e-9)

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> TranslationRun:
        """Shard encoder and decoder layers, and keep the decoder's gathered until backward."""
        model = Translator()
        mesh = init_device_mesh(device.type, tuple(cell.shape.values()), mesh_dim_names=tuple(cell.shape))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for encoder in model.encoder:
            fully_shard(encoder, mesh=mesh, mp_policy=policy)
        for decoder in model.decoder:
            fully_shard(decoder, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return TranslationRun(model, self.make_optimizer(model.parameters()), max_norm=max_norm)
