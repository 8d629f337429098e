"""OLMo-core's `TransformerTrainModule`: its own loop over micro-batches, division, clipping, and HSDP.

Tried with ai2-olmo-core 3.0.0. https://olmo-core.readthedocs.io
"""

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModule
from torch import nn
from torch.optim import AdamW, Optimizer

from conformance.subjects import LoopConfig, language_model, own_loop

VOCABULARY, LENGTH, CPU = 64, 16, torch.device("cpu")
_ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


def _record(*_args: Any, **_kwargs: Any) -> None:
    pass


class WithoutTrainer(TransformerTrainModule):  # type: ignore[misc]
    """Train module that logs nothing, since no trainer of OLMo-core has attached it."""

    record_metric = record_ce_loss = staticmethod(_record)
    trainer = SimpleNamespace(record_metric=_record)


def llama() -> nn.Module:
    """Return two layers, initialised."""
    config = TransformerConfig.llama_like(d_model=32, vocab_size=VOCABULARY, n_layers=2, n_heads=4)
    model: Any = config.build(init_device="cpu")
    model.init_weights(max_seq_len=LENGTH, device=CPU)
    return model  # type: ignore[no-any-return]


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer that OLMo-core makes."""
    return AdamW(parameters, **_ADAMW)


@own_loop(
    model=llama,
    **language_model(VOCABULARY, length=LENGTH),
    optimizer=adamw,
    meshes=["dp2", "hsdp2x2"],
    accumulation="even",
    processes="fresh",
)
def olmo_core(config: LoopConfig) -> Iterator[None]:
    """Let the train module split each step's batch into its micro-batches."""
    kind = DataParallelType.hsdp if "dp_replicate" in config.shape else DataParallelType.fsdp
    module = WithoutTrainer(
        config.model(),
        AdamWConfig(**_ADAMW),
        rank_microbatch_size=LENGTH,
        max_sequence_length=LENGTH,
        device=CPU,
        dp_config=TransformerDataParallelConfig(name=kind, num_replicas=config.shape.get("dp_replicate")),
        max_grad_norm=config.max_norm,
    )
    for joined in config.joined_steps:
        module.rank_microbatch_size = joined["labels"].numel() // config.accumulation
        module.zero_grads()
        module.train_batch(joined)
        module.optim_step()
        yield
