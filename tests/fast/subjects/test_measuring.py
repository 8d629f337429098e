"""Memory that torch hands out while a subject builds its model, and the settings that are changed for it."""

import pytest
import torch

from conformance.subjects.measuring import uninitialised_is_nan


def settings() -> tuple[bool, bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )


@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("fills", [True, False])
def test_settings_are_as_before(monkeypatch: pytest.MonkeyPatch, enabled: bool, warn_only: bool, fills: bool) -> None:
    """Also with a torch that fills no memory, which is refused."""
    if not fills:
        monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    before = settings()
    try:
        if fills:
            with uninitialised_is_nan():
                assert torch.empty(2).isnan().all()
        else:
            with pytest.raises(RuntimeError, match="does not fill uninitialised memory"), uninitialised_is_nan():
                pass
        assert settings() == before
    finally:
        torch.use_deterministic_algorithms(False)
