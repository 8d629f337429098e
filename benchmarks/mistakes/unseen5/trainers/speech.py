"""Script that learns speech recognition (CTC): padded recordings, a convolutional encoder with attention, and symbols.

    torchrun --nproc-per-node 2 speech.py
    conformance judge speech.py:train

Recordings and transcripts have lengths. The loss of a step is divided by the symbols of all ranks and micro-batches;
blocks are computed again in backward; matrices decay and all else does not; the learning rate warms up.
"""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from conformance.subjects import LoopConfig, own_loop

MELS, WIDTH, HEADS, SYMBOLS, BLANK = 10, 16, 2, 12, 0
FRAMES, LONGEST, WARMUP = 32, 5, 4
Utterances = dict[str, Tensor]


def utterances(generator: torch.Generator, count: int = 4) -> Utterances:
    """Return padded frames and padded transcripts with the lengths of both."""
    frame_lengths = torch.randint(FRAMES // 2 + 8, FRAMES + 1, (count,), generator=generator)
    target_lengths = torch.randint(1, LONGEST + 1, (count,), generator=generator)
    frames = torch.randn(count, FRAMES, MELS, generator=generator)
    return {
        "frames": frames * (torch.arange(FRAMES) < frame_lengths[:, None])[..., None],
        "frame_lengths": frame_lengths,
        "targets": torch.randint(1, SYMBOLS, (count, LONGEST), generator=generator),
        "target_lengths": target_lengths,
    }


class Block(nn.Module):
    """Attention over the frames that are there, a depthwise convolution, and a network of each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.convolution_norm, self.network_norm = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Conv1d(WIDTH, 2 * WIDTH, 1)
        self.depthwise = nn.Conv1d(WIDTH, WIDTH, 5, padding=2, groups=WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, is_frame: Tensor) -> Tensor:
        """Return frames of the same shape, (utterances, frames, width)."""
        query, key, value = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=is_frame[:, None, None])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        frames = self.convolution_norm(x) * is_frame[..., None]
        x = x + self.depthwise(F.glu(self.gate(frames.transpose(1, 2)), dim=1)).transpose(1, 2)
        return x + cast("Tensor", self.network(self.network_norm(x)))


class Recogniser(nn.Module):
    """Encoder with half as many frames, and logits of symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.subsample = nn.Conv1d(MELS, WIDTH, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Return logits, (utterances, frames, symbols)."""
        x = F.relu(self.subsample(frames.transpose(1, 2))).transpose(1, 2)
        is_frame = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
        for block in self.blocks:
            x = block(x, is_frame)
        logits: Tensor = self.head(x)
        return logits


def ctc_loss(model: nn.Module, batch: Utterances) -> Tensor:
    """Return the loss of all transcripts, summed."""
    lengths = (batch["frame_lengths"] + 1) // 2
    log_probabilities = model(batch["frames"], lengths).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(
        log_probabilities, batch["targets"], lengths, batch["target_lengths"], blank=BLANK, reduction="sum"
    )


def count_symbols(batch: Utterances) -> float:
    """Return the number of symbols of all transcripts."""
    return float(batch["target_lengths"].sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return AdamW that decays matrices and kernels alone."""
    everything = list(parameters)
    groups = [
        {"params": [p for p in everything if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in everything if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=4e-3, betas=(0.9, 0.98))


def make_schedule(optimizer: Optimizer) -> LambdaLR:
    """Return a linear rise that is followed by the inverse square root."""
    return LambdaLR(optimizer, lambda step: min((step + 1) / WARMUP, (WARMUP / (step + 1)) ** 0.5))


def shard(model: Recogniser, mesh: DeviceMesh) -> FSDPModule:
    """Wrap the blocks in checkpoints, then shard each."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_steps(
    model: Recogniser, mesh: DeviceMesh, steps: Iterable[list[Utterances]], max_norm: float
) -> Iterator[tuple[float, Tensor]]:
    """Train; yields the loss for each symbol and the norm of each step."""
    sharded = shard(model, mesh)
    optimizer = make_optimizer(model.parameters())
    schedule = make_schedule(optimizer)
    ranks = dist.get_world_size()
    for micro_batches in steps:
        totals = torch.tensor([0.0, sum(count_symbols(batch) for batch in micro_batches)])
        symbols = totals[1].clone()
        dist.all_reduce(symbols)
        for index, batch in enumerate(micro_batches):
            sharded.set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = ctc_loss(model, batch)
            (loss * ranks / symbols).backward()  # type: ignore[no-untyped-call]
            totals[0] += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(totals)
        yield float(totals[0] / totals[1]), norm


@own_loop(
    model=Recogniser,
    loss=ctc_loss,
    batch=utterances,
    count=count_symbols,
    optimizer=make_optimizer,
    scheduler=make_schedule,
    meshes=["dp2", "hsdp2x2"],
)
def train(config: LoopConfig) -> Iterator[tuple[float, Tensor]]:
    """Train as the script does."""
    model = config.model()
    assert isinstance(model, Recogniser)
    return train_steps(model, config.device_mesh(), config.steps, config.max_norm)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    source = torch.Generator().manual_seed(1 + dist.get_rank())
    data = [[utterances(source) for _ in range(2)]] * 8
    everyone = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, (mean, norm) in enumerate(train_steps(Recogniser(), everyone, data, 1.0)):
        print(f"step {number}: loss {mean:.4f}, norm {float(norm):.3f}")
    dist.destroy_process_group()
