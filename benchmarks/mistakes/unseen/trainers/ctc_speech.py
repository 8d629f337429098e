"""Speech recognition: strided convolutions and LSTMs over packed sequences, with the CTC loss.

    conformance judge ctc_speech.py:train

Own loop; utterances and transcripts have unequal lengths, and the mean is over the characters of a step.
"""

from collections.abc import Iterable, Iterator
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the field's standard name
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import Adagrad, Optimizer

from conformance.subjects import LoopConfig, own_loop

MELS, WIDTH, FRAMES, CHARACTERS, LONGEST, STRIDE = 8, 14, 24, 9, 4, 2
Speech = dict[str, Tensor]


class Recognizer(nn.Module):
    """Convolutions that halve the frames, LSTMs in both directions, and logits; character 0 is the blank."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv1d(MELS, WIDTH, 3, stride=STRIDE, padding=1), nn.GELU(), nn.Conv1d(WIDTH, WIDTH, 1), nn.GELU()
        )
        self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.characters = nn.Linear(2 * WIDTH, CHARACTERS)

    def forward(self, mels: Tensor, lengths: Tensor) -> Tensor:
        """Return logits (samples, FRAMES // STRIDE, CHARACTERS) of features (samples, FRAMES, MELS)."""
        x = self.convolutions(mels.transpose(1, 2)).transpose(1, 2)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=FRAMES // STRIDE)
        return cast("Tensor", self.characters(self.norm(x)))


def utterances(generator: torch.Generator) -> Speech:
    """Return features, lengths in frames after the stride, transcripts and their lengths."""
    lengths = torch.randint(2 * LONGEST + 1, FRAMES // STRIDE + 1, (4,), generator=generator)
    is_speech = torch.arange(FRAMES) < STRIDE * lengths[:, None]
    return {
        "mels": torch.randn(4, FRAMES, MELS, generator=generator) * is_speech[..., None],
        "lengths": lengths,
        "characters": torch.randint(1, CHARACTERS, (4, LONGEST), generator=generator),
        "numbers": torch.randint(1, LONGEST + 1, (4,), generator=generator),
    }


def ctc_loss(model: nn.Module, speech: Speech) -> Tensor:
    """Return the negative log likelihood of all transcripts, summed."""
    logits = model(speech["mels"], speech["lengths"])
    log_probabilities = logits.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probabilities, speech["characters"], speech["lengths"], speech["numbers"], reduction="sum")


def characters(speech: Speech) -> int:
    """Return the number of characters of the transcripts."""
    return int(speech["numbers"].sum())


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return Adagrad."""
    return Adagrad(parameters, lr=0.01, initial_accumulator_value=0.1)


@own_loop(
    model=Recognizer,
    loss=ctc_loss,
    batch=utterances,
    count=characters,
    optimizer=make_optimizer,
    meshes=["dp2", "hsdp2x2"],
)
def train(config: LoopConfig) -> Iterator[dict[str, Tensor]]:
    """Train; convolutions, recurrent layers and the rest are groups."""
    model = cast("Recognizer", config.model())
    mesh = config.device_mesh()
    fully_shard(model.convolutions, mesh=mesh)
    fully_shard(model.recurrent, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model.parameters())
    for micro_batches in config.steps:
        total = torch.tensor([float(sum(map(characters, micro_batches))), 0.0])
        dist.all_reduce(total[:1])
        for index, speech in enumerate(micro_batches):
            cast("FSDPModule", model).set_requires_gradient_sync(index == len(micro_batches) - 1)
            loss = ctc_loss(model, speech)
            (loss * dist.get_world_size() / total[0]).backward()  # type: ignore[no-untyped-call]
            total[1] += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total[1:])
        yield {"loss": total[1] / total[0], "grad_norm": norm}
