"""Build of the simulated device: compiled on first use, and kept for each torch, Python and compiler.

The process that calls `device_library` needs no torch: torch's extension builder runs in a separate process, see
`compiling`.
"""

import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from conformance.outcomes import Unsupported
from conformance.torch_release import release

MODULE = "simdev"
"""Name of the extension module."""
LIBRARY_VARIABLE = "CONFORMANCE_SIM_LIBRARY"
"""Environment variable with the path of the compiled device, which ranks load."""
CACHE_VARIABLE = "XDG_CACHE_HOME"
SINCE = "2.9"
"""First torch release with which the device was compiled; it uses C++ interfaces that older ones lack."""
_SOURCES = Path(__file__).parent / "csrc"
FLAGS = ("-O1", "-g0", "-DAT_PER_OPERATOR_HEADERS")  # optimised code would save nothing: kernels are torch's own
_LIMIT_S = 1800.0
_VERSION_LIMIT_S = 60.0
_REFRESH_S = 1.0
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
    """Return a name that identifies all inputs of the compilation."""
    version = _version(compiler)
    torch = importlib.metadata.version("torch")
    facts = [version, torch, sys.version, platform.machine(), *FLAGS, *(file.read_text() for file in source_files())]
    return f"torch-{torch}-{hashlib.sha256(chr(0).join(facts).encode()).hexdigest()[:16]}"


def _version(compiler: str) -> str:
    command = [compiler, "--version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_VERSION_LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        raise Unsupported(f"the simulated accelerator cannot be compiled: {compiler} has no version: {error}") from None
    return done.stdout


def source_files() -> list[Path]:
    """Return the sources of the device and their headers."""
    return sorted(_SOURCES.iterdir())


def _build(directory: Path, compiler: str) -> None:
    """Compile in `directory`, where the library appears when it is complete."""
    log_file = directory / "build.log"
    note = f"building the simulated accelerator for this torch, once; may take minutes ({log_file})"
    print(note, file=sys.stderr, flush=True)
    start_s = time.monotonic()
    command = [sys.executable, "-m", f"{__package__}.compiling", str(directory)]
    environment = os.environ | {"CXX": compiler, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # or it would wait for itself
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            status = _wait(process, directory)
        except subprocess.TimeoutExpired:
            limit = f"the compiler needs more than {_LIMIT_S:g} s ({log_file})"
            raise Unsupported(f"the simulated accelerator cannot be compiled: {limit}") from None
        finally:
            process.kill()
            process.wait()
    if status:
        reason = _first_error(log_file) if status > 0 else f"signal {-status} has ended the compilation ({log_file})"
        raise Unsupported(f"the simulated accelerator cannot be compiled: {reason}")
    print(f"built in {time.monotonic() - start_s:.0f} s", file=sys.stderr, flush=True)


def _wait(process: subprocess.Popen[bytes], directory: Path) -> int:
    """Return the exit status of the compilation; a terminal shows the elapsed time and the step until then.

    Raises subprocess.TimeoutExpired after `_LIMIT_S`.
    """
    deadline_s = time.monotonic() + _LIMIT_S
    with tqdm(bar_format="{desc}: {elapsed}", desc=_step(directory), disable=None, leave=False) as bar:
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                return process.wait(min(_REFRESH_S, left_s))
            except subprocess.TimeoutExpired:
                bar.set_description_str(_step(directory))
    raise subprocess.TimeoutExpired(process.args, _LIMIT_S)


def _step(directory: Path) -> str:
    return "linking" if any(directory.glob("build/**/*.o")) else "compiling"


def _first_error(log: Path) -> str:
    lines = log.read_text().splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else "no output") + f" ({log})"
