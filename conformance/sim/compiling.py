"""Compilation of the simulated device by torch's extension builder: a program, since the builder imports torch.

`python -m conformance.sim.compiling DIRECTORY`
"""

import shutil
import sys
from pathlib import Path

from setuptools import Distribution  # type: ignore[import-untyped]  # torch depends on it
from torch.utils.cpp_extension import BuildExtension, CppExtension

from conformance.sim.building import FLAGS, MODULE, source_files


def compile_in(directory: Path) -> None:
    """Compile the device; the library appears in the directory when it is complete.

    All sources are one translation unit: torch's headers, which take nearly all of the time, are then read once.
    """
    unit = directory / f"{MODULE}.cpp"
    unit.write_text("".join(f'#include "{file}"\n' for file in source_files() if file.suffix == ".cpp"))
    extension = CppExtension(MODULE, [str(unit)], extra_compile_args=list(FLAGS))  # type: ignore[no-untyped-call]
    command = BuildExtension(Distribution({"name": MODULE, "ext_modules": [extension]}), no_python_abi_suffix=True)
    command.build_lib = command.build_temp = str(directory / "build")
    command.ensure_finalized()
    command.run()
    (built,) = (directory / "build").glob(f"{MODULE}*.so")
    built.rename(directory / f"{MODULE}.so")
    shutil.rmtree(directory / "build")


if __name__ == "__main__":
    compile_in(Path(sys.argv[1]))
