"""Garbage at the end of a session: modules are not traversed, and no binding reports leaks."""

import gc
import sys

import pytest

from conformance.pytest_plugin.session import leave_garbage_to_the_end


@pytest.mark.parametrize("has_triton", [False, True])
def test_nothing_is_frozen_where_triton_would_report_leaks(monkeypatch: pytest.MonkeyPatch, has_triton: bool) -> None:
    if has_triton:
        monkeypatch.setitem(sys.modules, "triton", sys)
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    gc.freeze()
    leave_garbage_to_the_end()
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    assert (frozen > 0) != has_triton
