"""Build of wheels; all else is in pyproject.toml.

A checkout uses matrix.yaml, matrix.lock and waivers.yaml at its top. A wheel has them in the package, where
`conformance.project.data_file` looks for them.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA_FILES = ("matrix.yaml", "matrix.lock", "waivers.yaml")


class BuildWithDataFiles(build_py):
    """Build that copies the data files into the package, unless the installation is editable."""

    def run(self) -> None:
        """Build the packages, then add the data files."""
        super().run()
        if not self.editable_mode:
            for name in DATA_FILES:
                self.copy_file(name, str(Path(self.build_lib, "conformance", name)))


setup(cmdclass={"build_py": BuildWithDataFiles})
