"""PyTorch's examples of FSDP2 and of FSDP with tensor parallelism, from the user's own checkout.

The variable PYTORCH_EXAMPLES names the checkout of https://github.com/pytorch/examples, which no package installs.
"""

from functools import partial
from operator import methodcaller
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, parallel
from torch.optim import Adam, AdamW

from conformance.subjects import ParallelConfig, language_model, subject
from conformance.subjects.shipped.checkouts import module_in_checkout

VOCABULARY, LENGTH = 32, 8
example = partial(module_in_checkout, "PYTORCH_EXAMPLES", repository="https://github.com/pytorch/examples")


def transformer() -> nn.Module:
    """Return the model of FSDP2/example.py, without dropout."""
    module = example("distributed/FSDP2/model.py")
    return module.Transformer(module.ModelArgs(vocab_size=VOCABULARY, dropout_p=0))  # type: ignore[no-any-return]


@subject(
    model=transformer,
    **language_model(VOCABULARY, length=LENGTH),
    initialize=methodcaller("reset_parameters"),
    optimizer=partial(Adam, lr=1e-2),
    precisions=["fp32", "bf16"],
)
def pytorch_examples_fsdp2(model: Any, mesh: DeviceMesh, config: ParallelConfig) -> None:
    """Shard each layer, and the root."""
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh, **config.policies)


def llama() -> nn.Module:
    """Return a small model of tensor_parallelism/fsdp_tp_example.py."""
    module = example("distributed/tensor_parallelism/llama2_model.py")
    sizes = module.ModelArgs(dim=32, n_layers=2, n_heads=4, vocab_size=VOCABULARY, multiple_of=16, max_seq_len=LENGTH)
    return module.Transformer(sizes)  # type: ignore[no-any-return]


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
    optimizer=partial(AdamW, lr=3e-3, foreach=True),
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
