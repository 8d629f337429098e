"""Token file and sample order: the batch of a step depends on seed and step alone, never on the mesh."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reference_trainer.checks import UsageError
from reference_trainer.config import DataConfig

IGNORED_LABEL = -100
_SHIPPED_CORPUS = Path(__file__).parent / "corpus" / "alice.txt"


def open_tokens(path: str | None) -> npt.NDArray[np.integer]:
    """Memory-map a token file: `.npy` with one dimension of integers, anything else as bytes.

    Raises UsageError if the file cannot be read as tokens.
    """
    file = Path(path) if path is not None else _SHIPPED_CORPUS
    if not file.is_file():
        raise UsageError(f"data.path {file} is not a file")
    try:
        if file.suffix != ".npy":
            return np.memmap(file, dtype=np.uint8, mode="r")
        tokens: npt.NDArray[np.integer] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise UsageError(f"data.path {file} cannot be read as tokens: {error}") from None
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise UsageError(f"data.path {file} holds {tokens.dtype} of shape {tokens.shape}, need a 1-d array of integers")
    return tokens


class Batches:
    """Batches of a run, by step."""

    def __init__(self, config: DataConfig, *, vocab_size: int, seed: int) -> None:
        self.config, self.vocab_size, self.seed = config, vocab_size, seed
        self.tokens = open_tokens(config.path)
        if len(self.tokens) <= config.seq_len:
            raise UsageError(f"token file has {len(self.tokens)} tokens, need more than data.seq_len {config.seq_len}")

    def global_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return inputs and labels of one optimizer step, int64 of shape (global_batch_size, seq_len) each.

        Tokens beyond the vocabulary are folded into it (modulo), so that a byte corpus serves any vocabulary size.
        """
        length, count = self.config.seq_len, self.config.global_batch_size
        generator = np.random.Generator(np.random.Philox(key=np.array([self.seed, step], dtype=np.uint64)))
        starts = generator.integers(0, len(self.tokens) - length, size=count)
        windows = np.stack([self.tokens[start : start + length + 1] for start in starts]).astype(np.int64)
        windows %= self.vocab_size
        inputs, labels = torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())
        shortest = max(1, round(self.config.min_valid_fraction * length))
        valid = torch.from_numpy(generator.integers(shortest, length + 1, size=count))
        labels[torch.arange(length) >= valid.unsqueeze(1)] = IGNORED_LABEL
        return inputs, labels

    def micro_batches(self, step: int, *, dp_rank: int, dp_size: int, accumulation: int) -> list[tuple[Tensor, Tensor]]:
        """Return `accumulation` pairs of (inputs, labels), int64 of shape (samples, seq_len), for one rank and step.

        Ranks and micro-batches partition the global batch; `dp_rank` is one of `dp_size` data-parallel ranks. Raises
        UsageError if the global batch cannot be divided evenly.
        """
        size, remainder = divmod(self.config.global_batch_size, dp_size * accumulation)
        if remainder or not size:
            raise UsageError(
                f"data.global_batch_size {self.config.global_batch_size} is not divisible by "
                f"data-parallel ranks x accumulation = {dp_size} x {accumulation}"
            )
        inputs, labels = self.global_batch(step)
        first = dp_rank * accumulation * size
        bounds = [(first + i * size, first + (i + 1) * size) for i in range(accumulation)]
        return [(inputs[start:stop], labels[start:stop]) for start, stop in bounds]
