"""PyTorch's examples of FSDP2 and of FSDP with tensor parallelism, from the user's own checkout.

The variable PYTORCH_EXAMPLES names the checkout of https://github.com/pytorch/examples, which no package installs.
"""

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.optim import Adam, AdamW

from conformance.importing import load_file
from conformance.subjects import ParallelConfig, language_model, subject
from conformance.subjects.protocol import SubjectMistake

VARIABLE = "PYTORCH_EXAMPLES"
VOCABULARY, LENGTH = 32, 8


def example(path: str) -> ModuleType:
    """Return the module of a file of the checkout; raises SubjectMistake if there is none."""
    checkout = os.environ.get(VARIABLE)
    if checkout is None:
        raise SubjectMistake(f"set {VARIABLE} to your checkout of https://github.com/pytorch/examples")
    file = Path(checkout) / "distributed" / path
    if not file.is_file():
        raise SubjectMistake(f"{VARIABLE}={checkout} has no file distributed/{path}")
    return load_file(file)


def transformer() -> nn.Module:
    """Return the model of FSDP2/example.py, without dropout."""
    module = example("FSDP2/model.py")
    model: nn.Module = module.Transformer(module.ModelArgs(vocab_size=VOCABULARY, dropout_p=0))
    return model


def reset(model: Any) -> None:
    """Initialise the model as FSDP2/example.py does it."""
    model.reset_parameters()


@subject(
    model=transformer,
    **language_model(VOCABULARY, length=LENGTH),
    initialize=reset,
    optimizer=lambda parameters: Adam(parameters, lr=1e-2),
    precisions=["fp32", "bf16"],
)
def pytorch_examples_fsdp2(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Shard each layer, and the root."""
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, **config.policies)


def llama() -> nn.Module:
    """Return a small model of tensor_parallelism/fsdp_tp_example.py."""
    module = example("tensor_parallelism/llama2_model.py")
    sizes = module.ModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=VOCABULARY, multiple_of=16, max_seq_len=LENGTH)
    model: nn.Module = module.Transformer(sizes)
    return model


_ROWS = parallel.RowwiseParallel(output_layouts=Shard(1))
_ROOT: dict[str, parallel.ParallelStyle] = {
    "tok_embeddings": parallel.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": parallel.SequenceParallel(),
    "output": parallel.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
_LAYER: dict[str, parallel.ParallelStyle] = {
    "attention_norm": parallel.SequenceParallel(),
    "attention": parallel.PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
    **{f"attention.{name}": parallel.ColwiseParallel() for name in ("wq", "wk", "wv")},
    "attention.wo": _ROWS,
    "ffn_norm": parallel.SequenceParallel(),
    "feed_forward": parallel.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    **{f"feed_forward.{name}": parallel.ColwiseParallel() for name in ("w1", "w3")},
    "feed_forward.w2": _ROWS,
}
"""Plan of the example, whose script wraps the model in FSDP1: `fully_shard` takes its place."""


@subject(
    model=llama,
    **language_model(VOCABULARY, length=LENGTH),
    optimizer=lambda parameters: AdamW(parameters, lr=3e-3, foreach=True),
    meshes=["dp2-tp2"],
)
def pytorch_examples_tp(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Shard features and sequence over `tp`, with local numbers of heads, and all parameters over `dp_shard`."""
    parallel.parallelize_module(model, mesh["tp"], _ROOT)
    for layer in model.layers:
        layer.attention.n_heads //= mesh["tp"].size()
        layer.attention.n_kv_heads //= mesh["tp"].size()
        parallel.parallelize_module(layer, mesh["tp"], _LAYER)
    fully_shard(model, mesh=mesh["dp_shard"])
