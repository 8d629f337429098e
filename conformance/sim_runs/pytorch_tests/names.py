"""Random names that each recorded run of a test file repeats: of temporary files, and those that `uuid` gives.

Ranks tell each other the names of checkpoints and what identifies them. Other names are other bits.
"""

import multiprocessing
import os
import random
import shutil
import tempfile
import uuid
from pathlib import Path


class _Chance:
    """Generator that depends on the name of the process alone, and starts again in each fork."""

    def __init__(self) -> None:
        self._process, self._generator = 0, random.Random()

    def generator(self) -> random.Random:
        if self._process != os.getpid():
            self._process, self._generator = os.getpid(), random.Random(multiprocessing.current_process().name)
        return self._generator


def repeat_names() -> None:
    """Let this process and its forks choose the same names in each run."""
    chance = _Chance()

    class Names(tempfile._RandomNameSequence):  # type: ignore[name-defined,misc]  # nothing public chooses the names
        @property
        def rng(self) -> random.Random:
            return chance.generator()

    vars(tempfile)["_name_sequence"] = Names()
    uuid.uuid4 = lambda: uuid.UUID(int=chance.generator().getrandbits(128), version=4)


def own_temporary_directory() -> None:
    """Give this process and those that it starts an empty directory for temporary files, in the working directory."""
    directory = Path.cwd() / "temporary"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
