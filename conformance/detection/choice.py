"""Choice of the defects whose definitions a change has touched."""

import subprocess

from conformance.defects.catalogue import defects, sources_of
from conformance.defects.injection import Defect
from conformance.project import PROJECT
from reference_trainer.checks import UsageError


def changed_since(commit: str) -> list[Defect]:
    """Return the defects that are defined in files which differ between a commit and the working tree.

    Raises UsageError if git does not know the commit.
    """
    command = ["git", "diff", "--name-only", commit, "--", "conformance/defects"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(
            f"--changed-since {commit}: {done.stderr.strip() or 'git failed'}; name a commit of this clone"
        )
    changed = {PROJECT / line for line in done.stdout.splitlines()}
    return [each for each in defects() if changed & {*sources_of(each)}]
