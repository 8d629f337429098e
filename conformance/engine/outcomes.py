"""What the test of a law may raise, besides plain assertions, to end with a verdict."""

import pytest


class ConformanceFailure(AssertionError):
    """A comparison that a law demands did not hold."""


class Unsupported(pytest.skip.Exception):  # type: ignore[name-defined, misc]
    """The machine, or this torch, cannot run the case; the message says with numbers what is missing."""
