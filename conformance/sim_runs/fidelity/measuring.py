"""Run of the probes on a device."""

import os
import platform
from pathlib import Path
from textwrap import shorten

import msgspec
import torch

from conformance.run.devices.hardware import DETERMINISM
from conformance.sim_runs.fidelity.probes import PROBES
from conformance.sim_runs.fidelity.rules import Fact

_FAILURE_LENGTH = 160


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about a device, as the probes found them; content of a file under docs/gpu."""

    device: str
    """Name of the GPU, or `sim`."""
    torch: str
    cuda: str = ""
    """Version of CUDA with which torch was built; empty for the simulated device."""
    machine: str
    facts: dict[str, dict[str, Fact]]
    """Facts by id of the rule."""
    failures: dict[str, str]
    """Exceptions of probes that did not end, by id of the rule."""


def measure(device: torch.device) -> Measured:
    """Run all probes on a device; a probe that raises is a failure, and the next one runs."""
    os.environ |= DETERMINISM  # attention is chosen with deterministic algorithms, for which cuBLAS needs a variable
    facts: dict[str, dict[str, Fact]] = {}
    failures: dict[str, str] = {}
    for name, probe in PROBES.items():
        try:
            facts[name] = dict(probe(device))
        except Exception as error:  # the others are worth their results
            failures[name] = shorten(f"{type(error).__name__}: {error}", _FAILURE_LENGTH)
    is_gpu = device.type == "cuda"
    return Measured(
        device=torch.cuda.get_device_name(device) if is_gpu else device.type,
        torch=str(torch.__version__),
        cuda=str(torch.version.cuda) if is_gpu else "",
        machine=platform.machine(),
        facts=facts,
        failures=failures,
    )


def as_json(measured: Measured) -> str:
    """Return the content of a file of measured facts."""
    return msgspec.json.format(msgspec.json.encode(measured), indent=1).decode() + "\n"


def read(file: Path) -> Measured:
    """Return the facts of a file. Raises msgspec.ValidationError for another content."""
    return msgspec.json.decode(file.read_bytes(), type=Measured)
