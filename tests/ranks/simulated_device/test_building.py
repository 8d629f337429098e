"""Build of the simulated device: missing tools are named, and each torch and compiler builds once."""

import importlib.metadata
from pathlib import Path

import pytest

from conformance.outcomes import Unsupported
from conformance.project import PROJECT
from conformance.run.devices.hardware import Hardware, find_hardware
from conformance.simulated_device import building
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


def test_a_failed_build_shows_the_compilers_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_compiler(monkeypatch, tmp_path, version="exit 0", compiles="echo 'x.cpp:1: error: no such thing'; exit 1")
    with pytest.raises(Unsupported, match=r"cannot be compiled: .*error"):
        building.device_library()


@pytest.mark.parametrize("version", ["exit 1", "sleep 60"])
def test_a_compiler_without_a_version_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    monkeypatch.setattr(building, "_VERSION_LIMIT_S", 0.2, raising=False)
    use_compiler(monkeypatch, tmp_path, version=version, compiles="exit 0")
    hardware = on_sim()
    assert hardware.simulated is not None
    assert f"cannot be compiled: {tmp_path}/c++ has no version" in hardware.simulated.lacks


def test_a_build_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(building, "_LIMIT_S", 0.5)
    use_compiler(monkeypatch, tmp_path, version="exit 0", compiles="sleep 60")
    hardware = on_sim()
    assert hardware.simulated is not None
    assert "cannot be compiled: the compiler needs more than 0.5 s" in hardware.simulated.lacks


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


def test_the_sources_are_in_the_wheel() -> None:
    patterns = (PROJECT / "pyproject.toml").read_text()
    assert "simulated_device/csrc/*.cpp" in patterns
    assert "simulated_device/csrc/*.h" in patterns
