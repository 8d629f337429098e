"""Results that come back from a lent machine: a few files, none large, in one folder."""

import shutil
import tarfile
from pathlib import Path

MAX_FILE_BYTES = 16 << 20
_LEFT_OUT = (".safetensors", ".html", ".lock", ".part")
_NAMES = ("screen.txt", "outcomes.json", "recipe.json")


def pack(work: Path, out: Path, *, call: str) -> list[Path]:
    """Put results into `out`: the screen, the outcomes, the recipe, logs, reports, and the allocator's history.

    Six files at most, each of at most `MAX_FILE_BYTES`; an archive that would be larger is cut into none, and the
    screen says so. Returns the files.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = [_copy(work / name, out / f"{call}-{name}") for name in _NAMES if (work / name).exists()]
    archives = {
        "logs": sorted(work.glob("*.log")),
        "reports": [file for file in sorted(work.rglob("*")) if _belongs_to_report(file, work)],
        "allocator": sorted(work.glob("allocator_history.pickle")),
    }
    for name, members in archives.items():
        if members:
            files += _archive(out / f"{call}-{name}.tgz", members, work)
    return files


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copyfile(source, target))


def _belongs_to_report(file: Path, work: Path) -> bool:
    """Return whether a file lies in a report's directory and says something that is not in another one."""
    return file.is_file() and file.parent != work and file.suffix not in _LEFT_OUT and file.name != "lock"


def _archive(file: Path, members: list[Path], work: Path) -> list[Path]:
    with tarfile.open(file, "w:gz") as archive:
        for member in members:
            archive.add(member, member.relative_to(work))
    if file.stat().st_size <= MAX_FILE_BYTES:
        return [file]
    note = file.with_suffix(".too-large.txt")
    note.write_text(f"{file.stat().st_size} bytes, more than {MAX_FILE_BYTES}\n")
    file.unlink()
    return [note]
