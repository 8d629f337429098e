"""Memory that is held is located by the collective that should have freed it, or by the line that allocated it."""

from pathlib import Path

import pytest

from conformance.run.pool import Pools
from tests.ranks.localisation.test_families import located

DEEP = "dp4-fp32-table-meta-deep"


@pytest.mark.parametrize(
    ("defect", "place"),
    [
        ("one-layer-not-resharded", ("schedule", "layers.1")),
        ("reduce-buffers-kept", ("memory", "tok_embeddings")),
    ],
)
def test_held_memory_is_located(tmp_path: Path, pools: Pools, defect: str, place: tuple[str, str]) -> None:
    location = located(tmp_path, pools, "MEM-1", DEEP, defect)
    assert location is not None
    assert (location.family, location.name) == place
    assert located(tmp_path, pools, "MEM-1", DEEP, None) is None
