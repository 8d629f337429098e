"""A save with several writing threads succeeds although one of them could not write: the checkpoint is incomplete.

`FileSystemWriter._write_data` joins its threads, and no error of theirs reaches the caller.

severity: high
visible: silent
training: a full disk goes unnoticed until the checkpoint is needed, and it cannot be loaded
thread: https://github.com/pytorch/pytorch/issues/191391
law: CKPT-9
avoid: FileSystemWriter(thread_count=1), the default
ranks: 1
"""

import os
import sys
import tempfile
import threading

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem

other_has_begun = threading.Event()


class FullDisk(FileSystem):
    """Files of which the thread beside the calling one can write none."""

    def create_stream(self, path, mode):
        """Open a file."""
        if threading.current_thread() is threading.main_thread():
            other_has_begun.wait(5.0)  # so that the other thread takes one of the two files
        elif mode == "wb":
            other_has_begun.set()
            raise OSError("no space left on device")
        return super().create_stream(path, mode)


threading.excepthook = lambda _: None  # which would print the error
with tempfile.TemporaryDirectory() as directory:
    writer = dcp.FileSystemWriter(directory, thread_count=2)
    writer.fs = FullDisk()
    try:
        dcp.save({"a": torch.ones(2), "b": torch.ones(2)}, storage_writer=writer, no_dist=True)
        got, status = f"no error, and {sum(name.endswith('.distcp') for name in os.listdir(directory))} of 2 files", 1
    except dcp.CheckpointException:
        got, status = "one", 0
print(f"torch {torch.__version__}: expected an error, got {got}")
sys.exit(status)
