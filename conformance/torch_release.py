"""Releases of torch in the form that laws, waivers and version traits compare."""

from packaging.version import Version

Release = tuple[int, ...]
"""Major and minor number of a release, such as (2, 13)."""


def release(version: str) -> Release:
    """Return major and minor number of a version of torch: (2, 13) for `2.13.0+cpu`.

    Raises `packaging.version.InvalidVersion`, a ValueError, for a string that is no version.
    """
    return Version(version).release[:2]
