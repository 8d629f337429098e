"""Private state of FSDP2: a version of torch that lacks an attribute is told in one line."""

from types import SimpleNamespace

import pytest

from conformance.instruments.fsdp_state import require_settings


def test_missing_settings_are_named_together() -> None:
    state = SimpleNamespace(_states_to_forward_prefetch=[])
    group = SimpleNamespace(fsdp_params=[], modules=(), mesh_info=SimpleNamespace(mesh=None))
    missing = (
        "FSDP2 has no SimpleNamespace._states_to_backward_prefetch, SimpleNamespace.post_forward_mesh_info, "
        "SimpleNamespace.shard_mesh_dim; adapt conformance.instruments.fsdp_state"
    )
    with pytest.raises(RuntimeError, match=missing):
        require_settings(state, group)
