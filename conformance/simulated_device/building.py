"""Build of the simulated device: compiled on first use, and kept for each torch, Python and compiler.

The process that calls `device_library` needs no torch: torch's extension builder runs in a process of its own,
`python -m conformance.simulated_device.building DIRECTORY`.
"""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from filelock import FileLock

from conformance.outcomes import Unsupported
from conformance.torch_release import release

MODULE = "simdev"
"""Name of the extension module."""
LIBRARY_VARIABLE = "CONFORMANCE_SIM_LIBRARY"
"""Environment variable with the path of the compiled device, which ranks load."""
CACHE_VARIABLE = "XDG_CACHE_HOME"
SINCE = "2.13"
"""First torch release with which the device was compiled; it uses C++ interfaces that older ones lack."""
_SOURCES = Path(__file__).parent / "csrc"
_FLAGS = ("-O1", "-g0", "-DAT_PER_OPERATOR_HEADERS")  # optimised code would save nothing: kernels are torch's own
_LIMIT_S = 1800.0
_REMEDIES = {
    "compiler": "a C++ compiler: install g++ (apt install g++, dnf install gcc-c++), or set CXX",
    "headers": "Python's headers: install those of this Python (apt install python3-dev, dnf install python3-devel)",
}


def device_library() -> Path:
    """Return the compiled device; builds it, which takes minutes, if this machine has none for this torch.

    Raises Unsupported, with the package to install or the compiler's message, if it cannot be built.
    """
    torch = importlib.metadata.version("torch")
    if release(torch) < release(SINCE):
        raise Unsupported(f"the simulated accelerator is for torch {SINCE} and later; this is {torch}")
    compiler = _compiler()
    directory = cache_directory() / _key(compiler)
    library = directory / f"{MODULE}.so"
    if library.exists():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / "lock"):
        if not library.exists():
            _build(directory, compiler)
    return library


def cache_directory() -> Path:
    """Return the user's directory for compiled devices, `$XDG_CACHE_HOME/fsdp2-tp-conformance/simulated_device`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache", "fsdp2-tp-conformance", "simulated_device")


def _compiler() -> str:
    """Return the path of the C++ compiler that torch's extension builder would use."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise _lacking("compiler")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        raise _lacking("headers")
    return compiler


def _lacking(what: str) -> Unsupported:
    return Unsupported(f"the simulated accelerator is compiled on first use and needs {_REMEDIES[what]}")


def _key(compiler: str) -> str:
    """Return a name for all that the compiled device depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    torch = importlib.metadata.version("torch")
    parts = [version, torch, sys.version, platform.machine(), *_FLAGS, *(file.read_text() for file in _files())]
    return f"torch-{torch}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"


def _files() -> list[Path]:
    return sorted(_SOURCES.iterdir())


def _build(directory: Path, compiler: str) -> None:
    """Compile in `directory`; the library appears there when it is complete."""
    log_file = directory / "build.log"
    note = f"building the simulated accelerator for this torch, once; may take minutes ({log_file})"
    print(note, file=sys.stderr, flush=True)
    command = [sys.executable, "-m", f"{__package__}.building", str(directory)]
    environment = os.environ | {"CXX": compiler}
    with log_file.open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=_LIMIT_S, env=environment)
    if done.returncode:
        raise Unsupported(f"the simulated accelerator cannot be compiled: {_first_error(log_file)}")


def _first_error(log: Path) -> str:
    lines = log.read_text().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no output") + f" ({log})"


def compile_in(directory: Path) -> None:
    """Compile the device with torch's extension builder.

    All sources are one translation unit: torch's headers, which take nearly all of the time, are then read once.
    """
    from setuptools import Distribution  # type: ignore[import-untyped]  # torch depends on it
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    unit = directory / f"{MODULE}.cpp"
    unit.write_text("".join(f'#include "{file}"\n' for file in _files() if file.suffix == ".cpp"))
    extension = CppExtension(MODULE, [str(unit)], extra_compile_args=list(_FLAGS))  # type: ignore[no-untyped-call]
    command = BuildExtension(Distribution({"name": MODULE, "ext_modules": [extension]}), no_python_abi_suffix=True)
    command.build_lib = command.build_temp = str(directory / "build")
    command.ensure_finalized()
    command.run()
    (built,) = (directory / "build").glob(f"{MODULE}*.so")
    built.rename(directory / f"{MODULE}.so")
    shutil.rmtree(directory / "build")


if __name__ == "__main__":
    compile_in(Path(sys.argv[1]))
