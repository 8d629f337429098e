"""Memory of each tensor: on the device of computation or on the host, from the configuration alone.

Source: torch.distributed.fsdp.CPUOffloadPolicy. Sharded parameters, gradients and optimizer state are offloaded;
unsharded parameters, activations and buffers are not.
"""

from collections.abc import Iterable

from conformance.oracles.outline import outline
from reference_trainer.config import TrainerConfig

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
