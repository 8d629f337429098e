"""Releases of torch in the form that laws, waivers and version traits compare."""

from packaging.version import Version

Release = tuple[int, ...]
"""Major and minor number of a release, such as (2, 13)."""

TRIED: tuple[Release, ...] = ((2, 11), (2, 13), (2, 15))
"""Releases of torch whose verdicts docs/versions.md has, the earliest first."""


def release(version: str) -> Release:
    """Return major and minor number of a version of torch: (2, 13) for `2.13.0+cpu`.

    Raises `packaging.version.InvalidVersion`, a ValueError, for a string that is no version.
    """
    return Version(version).release[:2]


def untried(version: str) -> str:
    """Return a warning of one line about a version of torch of whose release no verdict is known; empty if one is."""
    if release(version) in TRIED:
        return ""
    known = ", ".join(f"{major}.{minor}" for major, minor in TRIED)
    return f"torch {version} was never tried with this suite (tried: {known}): a failure may be the suite's own"
