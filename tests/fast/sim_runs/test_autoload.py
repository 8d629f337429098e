"""A Python that has the package on its path alone, so that `import torch` in other processes does not find it."""

import pytest

from conformance.sim import autoload
from reference_trainer.checks import UsageError


def test_a_package_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    autoload.require_installed()
    monkeypatch.setattr(autoload, "entry_points", lambda **_: ())
    with pytest.raises(UsageError, match="pip install"):
        autoload.require_installed()
