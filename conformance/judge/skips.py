"""The outcome that pytest calls a skip, and reports never call a pass."""

import pytest


class Unsupported(pytest.skip.Exception):  # type: ignore[name-defined, misc]
    """The machine, or this torch, cannot run the case; the message says with numbers what is missing."""
