"""Dtype and memory of every tensor in a run, from the configuration alone.

Source: torch.distributed.fsdp.MixedPrecisionPolicy. Sharded parameters, and with them their reduced gradients and the
optimizer's state, keep the dtype in which they were sharded; `param_dtype` is the dtype of unsharded parameters,
computation and all-gathers, `reduce_dtype` that of reductions of gradients over data-parallel ranks. Buffers keep their
own dtype.

Source: torch.distributed.fsdp.CPUOffloadPolicy. Sharded parameters, gradients and optimizer state are offloaded;
unsharded parameters, activations and buffers are not.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from conformance.oracles.float8 import FLOAT8, gathered_in_float8, multiplied_in_float8
from conformance.oracles.frozen import is_trained
from conformance.oracles.outline import outline
from conformance.oracles.skipped import is_used
from conformance.torch_release import release
from reference_trainer.config import OptimizerConfig, TrainerConfig
from reference_trainer.model import Attention, Block, Transformer

Dtypes = dict[str, list[str]]
"""Sorted names of all dtypes of a thing, by its key in `instruments.dtypes`, such as `gradient/norm.weight`."""

FP32, BF16, FP16 = "float32", "bfloat16", "float16"


@dataclass(frozen=True)
class DtypePolicy:
    """Names of the dtypes of a precision."""

    compute: str
    """Dtype of unsharded parameters, activations and their gradients, all-gathers, tensor-parallel collectives."""
    reduce: str
    """Dtype of reductions of gradients over data-parallel ranks."""
    sharded: str = FP32
    """Dtype of sharded parameters other than norms, their gradients and optimizer state."""
    sharded_norms: str = FP32
    """Dtype of sharded parameters of norms, their gradients and optimizer state."""


def unset_reduce_dtype(torch_version: str) -> str:
    """Return the dtype that `reduce_dtype=None` means: `param_dtype`; from 2.15 on that of sharded parameters, fp32.

    Source: `versionchanged` in the documentation of `MixedPrecisionPolicy`.
    """
    return BF16 if release(torch_version) <= (2, 14) else FP32


_POLICIES = {
    "fp32": DtypePolicy(compute=FP32, reduce=FP32),
    "bf16-mp": DtypePolicy(compute=BF16, reduce=FP32),
    "bf16-init": DtypePolicy(compute=BF16, reduce=FP32),
    "bf16-reduce": DtypePolicy(compute=BF16, reduce=BF16),
    "bf16-params": DtypePolicy(compute=BF16, reduce=unset_reduce_dtype(str(torch.__version__))),
    "bf16-mixed": DtypePolicy(compute=BF16, reduce=FP32, sharded=BF16),
    "fp16-mp": DtypePolicy(compute=FP16, reduce=FP32),
    "fp16-reduce": DtypePolicy(compute=FP16, reduce=FP16),
}


def dtype_policy(precision: str) -> DtypePolicy:
    """Return the policy of a precision. Raises ValueError for a precision that has none."""
    if precision not in _POLICIES:
        raise ValueError(f"no dtype policy for precision {precision!r}, only for {', '.join(_POLICIES)}: add one here")
    return _POLICIES[precision]


def optimizer_state(config: OptimizerConfig) -> tuple[str, ...]:
    """Return the keys of an optimizer's state that are tensors of the parameter's size."""
    if config.name == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum else ()


def expected_dtypes(config: TrainerConfig, *, steps: Sequence[int] | None = None) -> Dtypes:
    """Return the dtypes of all things that `instruments.dtypes` looks at; the same on every rank of every mesh.

    `steps` are those of a run that has resumed; None: all.

    Raises ValueError for a precision without policy, and for a model without attention and log-softmax.
    """
    if config.model.arithmetic != "float":
        raise ValueError(f"no dtype policy for model.arithmetic {config.model.arithmetic}: use a cell of a float model")
    policy = dtype_policy(config.precision)
    model = outline(config.model)
    steps = range(config.steps) if steps is None else steps
    dtype_of = {
        **dict(_module_dtypes(model, config, policy, steps)),
        **dict(_state_dtypes(model, config, policy, steps)),
        "logits": policy.compute,
        "loss": FP32,
        **{f"{kind}/{phase}": policy.compute for kind in ("matmul", "attention") for phase in ("forward", "backward")},
    }
    narrow = (f"unsharded_parameter/{name}" for name in gathered_in_float8(config))
    dtype_of |= {thing: FLOAT8 for thing in narrow if thing in dtype_of}
    expected = {thing: [dtype] for thing, dtype in dtype_of.items()}
    if config.model.n_experts or multiplied_in_float8(config):  # in fp32 routers, and products that emulate float8
        expected |= {f"matmul/{phase}": sorted({policy.compute, FP32}) for phase in ("forward", "backward")}
    return expected


def _module_dtypes(
    model: Transformer, config: TrainerConfig, policy: DtypePolicy, steps: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Return the dtypes of computation. Modules inside of compiled blocks are traced, not called: no hook sees them."""
    phases = ("forward",) if config.activation_checkpointing == "none" else ("forward", "backward")
    for name, module in model.named_modules():
        if config.evaluation == "none" and not any(is_used(name, config, step=step) for step in steps):
            continue
        if isinstance(module, Block):
            yield from ((f"{kind}/{name}", policy.compute) for kind in ("block_input", "block_output"))
        elif config.compile != "none" and name.startswith("layers."):
            continue
        elif isinstance(module, Attention):
            yield from ((f"rope_table/{name}/{phase}", FP32) for phase in phases)
        elif isinstance(module, nn.Linear | nn.Embedding | nn.RMSNorm):
            yield f"module_input/{name}", "int64" if isinstance(module, nn.Embedding) else policy.compute
            yield f"module_output/{name}", policy.compute
            own_names = (own_name for own_name, _ in module.named_parameters(recurse=False))
            yield from ((f"unsharded_parameter/{name}.{own_name}", policy.compute) for own_name in own_names)


def _state_dtypes(
    model: Transformer, config: TrainerConfig, policy: DtypePolicy, steps: Sequence[int]
) -> Iterator[tuple[str, str]]:
    """Return the dtypes of gradients and of the state that is kept between steps."""
    norms = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.RMSNorm))
    state = [f"optimizer_state/{key}" for key in optimizer_state(config.optimizer)]
    for name, _ in model.named_parameters():
        dtype = policy.sharded_norms if name.startswith(norms) else policy.sharded
        kinds = ["initial_parameter", "final_parameter"]
        kinds += ["gradient"] if any(is_trained(name, config, step=step) for step in steps) else []
        kinds += state if any(is_trained(name, config, step=step) for step in range(config.steps)) else []
        yield from ((f"{kind}/{name}", dtype) for kind in kinds)
    for name, buffer in model.named_buffers():
        dtype = str(buffer.dtype).removeprefix("torch.")
        yield from ((f"{kind}/{name}", dtype) for kind in ("initial_buffer", "final_buffer"))


_OFFLOADED = ("initial_parameter", "final_parameter", "gradient", "optimizer_state")
_PINNED = ("initial_parameter", "final_parameter", "gradient")
"""Tensors in page-locked memory: parameters as soon as they are initialised, never the optimizer's state. Verified on
the simulated accelerator with `init` meta only, not with other strategies of initialisation, and not on a GPU."""


def expected_offloading(config: TrainerConfig) -> dict[str, str]:
    """Return the offloading policy of each parameter, as `instruments.offloading` reads it: `none`, `cpu`, ..."""
    names = [name for name, _ in outline(config.model).named_parameters()]
    return dict.fromkeys(names, "none" if config.offload == "none" else _host(config))


def expected_places(config: TrainerConfig, things: Iterable[str], *, device: str) -> dict[str, list[str]]:
    """Return the kinds of memory of things, by key in `instruments.dtypes`: a type of device, or `cpu pinned`.

    `device` is the type of the device that computes.
    """
    return {thing: [_place(thing.partition("/")[0], config, device)] for thing in things}


def _place(kind: str, config: TrainerConfig, device: str) -> str:
    if config.offload == "none" or kind not in _OFFLOADED:
        return device
    return _host(config) if kind in _PINNED else "cpu"


def _host(config: TrainerConfig) -> str:
    return "cpu pinned" if config.pin_memory else "cpu"
