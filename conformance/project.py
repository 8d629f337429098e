"""Paths of the project's files, in the checkout that contains this package."""

from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
"""Directory of the package `conformance`."""
PROJECT = PACKAGE.parent
"""Directory of the checkout, with `matrix.yaml`, `waivers.yaml` and `docs/`."""
