"""Shell completion, asked as a shell asks."""

import subprocess
from pathlib import Path

import pytest

from conformance.__main__ import main

COMPLETE = """
source "$1"
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
_shtab_conformance
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["de"], ["defects"]),
        (["ver"], ["verify", "versions"]),
        (["list", "--pro"], ["--profile"]),
        (["schema", "--"], ["--help", "--line"]),
    ],
)
def test_bash_completes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], completions: list[str]
) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--print-completion", "bash"])
    script = tmp_path / "completion.bash"
    script.write_text(capsys.readouterr().out)
    command = ["bash", "-c", COMPLETE, "bash", str(script), "conformance", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert sorted(done.stdout.split()) == completions, done.stderr
