"""verl's FSDP2, its loading of full weights and its clipping, with its fused log-probabilities, of Qwen 3.

Tried with verl 0.9.1. https://verl.readthedocs.io
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import AdamW

from conformance.subjects import ParallelConfig, subject, use_shims
from conformance.subjects.protocol import Batch

use_shims("cuda-as-processor")

from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402
from verl.models.transformers.dense_common import forward_with_torch_backend  # noqa: E402
from verl.utils import fsdp_utils  # noqa: E402

VOCABULARY, SAMPLES, LENGTH = 64, 4, 8


class FusedQwen3(Qwen3ForCausalLM):  # type: ignore[misc]
    """Qwen 3 that computes log-probabilities in one function with its head, as verl's patch makes it."""

    forward = forward_with_torch_backend


def qwen3(*, tied: bool) -> nn.Module:
    """Return two layers of Qwen 3."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    model: nn.Module = FusedQwen3(config)
    return model


def tokens_and_weights(generator: torch.Generator) -> Batch:
    """Return `input_ids`, int64, and `weight`, fp32, of shape (SAMPLES, LENGTH): a weight for each token's loss."""
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return {"input_ids": tokens, "weight": torch.rand(SAMPLES, LENGTH, generator=generator)}


def weighted_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the weighted sum of negative log-probabilities."""
    tokens = batch["input_ids"]
    log_probs: Tensor = model(input_ids=tokens, labels=tokens, temperature=1.0, return_dict=True).log_probs
    loss: Tensor = -(log_probs * batch["weight"]).sum()
    return loss


def _parallelize(model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> None:
    weights = model.state_dict()
    fsdp_utils.apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {"wrap_policy": {}})
    fsdp_utils.fsdp2_load_full_state_dict(model, weights, mesh, None)


_declare: Any = partial(
    subject,
    tied_model=partial(qwen3, tied=True),
    batch=tokens_and_weights,
    loss=weighted_loss,
    clip=fsdp_utils.fsdp2_clip_grad_norm_,
    optimizer=lambda parameters: AdamW(parameters, lr=1e-3),
    meshes=["dp2", "hsdp2x2"],
)
verl = _declare(model=partial(qwen3, tied=False))(_parallelize)
verl_tied = _declare(model=partial(qwen3, tied=True))(_parallelize)
