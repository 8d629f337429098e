"""Choice of the defects whose definitions a change has touched."""

import io
import subprocess
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from conformance.defects.catalogue import defects, definitions
from conformance.defects.injection import Defect
from conformance.project import PROJECT
from reference_trainer.checks import UsageError


def changed_since(commit: str) -> list[Defect]:
    """Return the defects whose definitions differ between a commit and the working tree.

    Raises UsageError if git does not know the commit.
    """
    command = ["git", "archive", commit, "conformance/defects"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, check=False)
    if done.returncode:
        reason = done.stderr.decode().strip() or "git failed"
        raise UsageError(f"--changed-since {commit}: {reason}; name a commit of this clone")
    with TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
        before = definitions(Path(folder, "conformance", "defects"))
    now = definitions()
    return [defect for defect in defects() if now[defect.id] != before.get(defect.id)]
