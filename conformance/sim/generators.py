"""Functions of `torch.sim` for random numbers, for processes whose devices have generators.

DTensor takes a device whose module has them for one with Philox generators (`is_rng_supported_mesh` in
torch/distributed/tensor/_random.py), so they are no functions of `torch_sim` where the device samples from the CPU's.
The state of a generator has 16 bytes, its seed and its offset.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from conformance.sim import torch_sim
from conformance.sim.torch_sim import Device, default_generator, device_count


def install() -> None:
    """Give `torch_sim` the functions of this module."""
    torch_sim._initialized = True
    torch_sim.default_generators = tuple(default_generator(index) for index in range(device_count()))
    for function in (
        get_rng_state,
        get_rng_state_all,
        set_rng_state,
        set_rng_state_all,
        manual_seed,
        seed,
        seed_all,
        initial_seed,
    ):
        setattr(torch_sim, function.__name__, function)


def get_rng_state(device: Device = None) -> Tensor:
    """Return the state of the device's default generator, 16 bytes on the host."""
    return default_generator(device).get_state()


def get_rng_state_all() -> list[Tensor]:
    """Return the state of the default generator of each device."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(state: Tensor, device: Device = None) -> None:
    """Set the state of the device's default generator."""
    default_generator(device).set_state(state)


def set_rng_state_all(states: Iterable[Tensor]) -> None:
    """Set the state of the default generator of each device."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


def manual_seed(seed: int) -> None:
    """Seed the default generator of the current device."""
    default_generator(None).manual_seed(seed)


def seed() -> None:
    """Seed the default generator of the current device with a number from the operating system."""
    default_generator(None).seed()


def seed_all() -> None:
    """Seed the default generators of all devices with one number from the operating system."""
    torch_sim.manual_seed_all(torch.seed())


def initial_seed() -> int:
    """Return the seed of the current device's default generator."""
    return default_generator(None).initial_seed()
