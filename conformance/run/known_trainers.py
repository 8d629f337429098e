"""Subjects that are known by name: entry points of installed packages, the suite's own adapters among them.

A package registers subjects in its pyproject.toml. An extra `subject-NAME` has what `NAME` and `NAME-...` need beside
the package itself:

    [project.entry-points."conformance.subjects"]
    my-trainer = "my_package.subject:parallelize"

    [project.optional-dependencies]
    subject-my-trainer = ["lightning"]
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path

from packaging.requirements import Requirement
from tabulate import tabulate

from reference_trainer.checks import UsageError
from reference_trainer.strict_yaml import allowed

GROUP = "conformance.subjects"
"""Group of the entry points."""
_PLACES = ("MODULE:NAME", "FILE.py:NAME")


@dataclass(frozen=True)
class KnownSubject:
    """Subject that an installed package registers."""

    name: str
    target: str
    """Module and name, as `conformance judge` takes them."""
    package: str
    """Package that registers the subject, with its version."""
    requirements: Sequence[Requirement]
    """Requirements of its extra: those of the package itself are installed with it."""

    @property
    def missing(self) -> list[str]:
        """Requirements of which no version is installed."""
        return [str(requirement) for requirement in self.requirements if _installed(requirement) is None]


def known_subjects() -> list[KnownSubject]:
    """Return all subjects that installed packages register, by name."""
    return sorted(map(_known, entry_points(group=GROUP)), key=lambda subject: (subject.name, subject.package))


def resolve(name: str) -> str:
    """Return module or file, and name, of a subject: as given, or as a package has registered them.

    Raises UsageError, with what is allowed, for a name that no package or more than one registers, and for a
    subject whose extra is not installed.
    """
    if ":" in name:
        return name
    known = known_subjects()
    named = [subject for subject in known if subject.name == name]
    if not named:
        raise UsageError(f"unknown subject `{name}`{allowed(name, [*_PLACES, *(subject.name for subject in known)])}")
    if len(named) > 1:
        packages = " and ".join(f"{subject.package} ({subject.target})" for subject in named)
        raise UsageError(f"subject `{name}` is registered by {packages}: write MODULE:NAME")
    (subject,) = named
    if subject.missing:
        needed = " ".join(subject.missing)
        raise UsageError(f"subject `{name}` needs packages that are not installed: pip install {needed}")
    return subject.target


def import_from_working_directory() -> None:
    """Let `MODULE:NAME` be found in the working directory; a command's script looks in its own directory alone."""
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def name_of(given: str) -> str:
    """Return the name in reports of a subject: as it is registered, or `MODULE:NAME`; of a file the name alone."""
    origin, separator, attribute = given.partition(":")
    return f"{Path(origin).stem}:{attribute}" if origin.endswith(".py") else f"{origin}{separator}{attribute}"


def as_text(known: Sequence[KnownSubject]) -> str:
    """Return a table of subjects: names, origins, and installed packages."""
    rows = [
        [subject.name, subject.target, subject.package, ", ".join(map(_state, subject.requirements)) or "nothing more"]
        for subject in known
    ]
    return tabulate(rows, headers=["subject", "is", "registered by", "needs"], disable_numparse=True)


def _known(entry: EntryPoint) -> KnownSubject:
    distribution, words = entry.dist, entry.name.split("-")
    extras = ["-".join(["subject", *words[:end]]) for end in range(1, len(words) + 1)]
    return KnownSubject(
        name=entry.name,
        target=f"{entry.module}:{entry.attr}",
        package=f"{distribution.name} {distribution.version}" if distribution else "",
        requirements=tuple(_requirements(distribution, extras)) if distribution else (),
    )


def _requirements(distribution: Distribution, extras: Sequence[str]) -> Iterator[Requirement]:
    """Yield requirements that a package has with extras alone, without their markers."""
    for text in distribution.requires or ():
        requirement = Requirement(text)
        marker, requirement.marker = requirement.marker, None
        if marker and not marker.evaluate() and any(marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def _installed(requirement: Requirement) -> str | None:
    """Return the installed version, or None."""
    try:
        return version(requirement.name)
    except PackageNotFoundError:
        return None


def _state(requirement: Requirement) -> str:
    installed = _installed(requirement)
    if installed is None:
        return f"{requirement} (not installed)"
    suits = requirement.specifier.contains(installed, prereleases=True)
    return f"{requirement.name} {installed}" if suits else f"{requirement} (installed: {installed})"
