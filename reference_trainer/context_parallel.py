"""Context parallelism: ranks share samples, each with a part of every sequence, and attention goes around a ring.

Source: https://docs.pytorch.org/tutorials/unstable/context_parallel.html. torch shards the buffers of a step in place,
and replaces `scaled_dot_product_attention` while a context is open. Backward has to be inside of it, too: outside,
torch computes other gradients (findings/ring_attention_backward_after_the_context.py).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel

from reference_trainer.config import TrainerConfig
from reference_trainer.device_attention import attention_by
from reference_trainer.mesh import build_context_mesh
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import ParallelDims


class ContextParallel:
    """Contexts in which the ranks of `mesh.cp` compute their parts of the sequences of a micro-batch.

    Building it is a collective call.
    """

    def __init__(self, config: TrainerConfig, dims: ParallelDims, device: torch.device) -> None:
        self._seq_len = config.data.seq_len
        self.mesh = build_context_mesh(dims, device)["cp"]
        """Mesh of one dimension: the ranks that share samples with this one."""
        self._device = device

    @contextmanager
    def shards(self, model: Transformer, inputs: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's part of inputs and labels: int64 of shape (samples, seq_len / cp), on the model's device.

        Inputs and labels are those of all ranks of `mesh.cp`, of shape (samples, seq_len). The parts have a piece of
        either half of each sequence, so that a causal mask leaves each rank the same work. Inside of the context the
        model's RoPE table has the same positions, and the model must run forward and backward.
        """
        table = model.rope_table
        buffers = [each.to(self._device, copy=True) for each in (inputs, labels, table[:, : self._seq_len])]
        with ExitStack() as stack:
            if self._device.type == "cpu":
                stack.enter_context(attention_by("flash"))
            ring = context_parallel(
                self.mesh, buffers=buffers, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(buffers)
            )
            stack.enter_context(ring)
            stack.callback(setattr, model, "rope_table", table)
            model.rope_table = buffers[2]
            yield buffers[0], buffers[1]
