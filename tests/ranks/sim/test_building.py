"""Build of the simulated device: missing tools are named, and each torch and compiler builds once."""

import importlib.metadata
import re
from pathlib import Path

import pytest

from conformance.outcomes import Unsupported
from conformance.run.devices.hardware import Hardware, find_hardware
from conformance.sim import building
from tests.support.fake_devices import FakeDevices


def on_sim(accelerator: str = "sim") -> Hardware:
    return find_hardware(FakeDevices(), accelerator=accelerator, share_gpu="auto")


def use_compiler(monkeypatch: pytest.MonkeyPatch, directory: Path, *, version: str, compiles: str) -> None:
    """Use a compiler that is made of two shell commands, and a cache without a compiled device."""
    compiler = directory / "c++"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {version}\n{compiles}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv(building.CACHE_VARIABLE, str(directory / "cache"))


def test_without_a_compiler_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match=r"install g\+\+ \(apt install g\+\+"):
        building.device_library()
    hardware = on_sim()
    assert hardware.simulated is not None
    assert "apt install" in hardware.simulated.lacks
    assert hardware.substrate(2, ("gloo", "sim")) == "sim", "cases are unsupported, and not judged on gloo instead"


def test_an_older_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2.8.0+cpu")
    with pytest.raises(Unsupported, match=r"for torch 2\.9 and later; this is 2\.8\.0"):
        building.device_library()


@pytest.mark.parametrize(
    ("version", "compiles", "limit_s", "message"),
    [
        ("exit 0", "echo 'x.cpp:1: error: no such thing'; exit 1", 60.0, r".*error"),
        ("exit 1", "exit 0", 60.0, r"/\S+/c\+\+ has no version"),
        ("sleep 60", "exit 0", 0.5, r"/\S+/c\+\+ has no version"),
        ("exit 0", "sleep 60", 0.5, r"the compiler needs more than 0\.5 s"),
    ],
)
def test_a_build_that_fails_or_lasts_shows_the_compilers_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, compiles: str, limit_s: float, message: str
) -> None:
    for name in ("_VERSION_LIMIT_S", "_LIMIT_S"):
        monkeypatch.setattr(building, name, limit_s)
    use_compiler(monkeypatch, tmp_path, version=version, compiles=compiles)
    hardware = on_sim()
    assert hardware.simulated is not None
    assert re.search(f"cannot be compiled: {message}", hardware.simulated.lacks)


def test_a_compiled_device_is_used_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(building.CACHE_VARIABLE, str(tmp_path))
    built: list[Path] = []

    def build(directory: Path, _compiler: str) -> None:
        built.append(directory)
        (directory / "simdev.so").touch()

    monkeypatch.setattr(building, "_build", build)
    assert building.device_library() == building.device_library()
    assert len(built) == 1


@pytest.mark.parametrize("accelerator", ["sim:late", "sim:random", "sim:eager:1", "cuda:lazy"])
def test_an_unknown_schedule_is_refused(accelerator: str) -> None:
    with pytest.raises(ValueError, match="write"):
        on_sim(accelerator)
