"""First causes of the mistakes that tests/ranks/subjects/test_causes.py leaves out."""

from pathlib import Path

import pytest

from conformance.run.pool import Pools
from tests.ranks.subjects.test_causes import FIRST, require_first_cause


@pytest.mark.parametrize(("name", "cells", "sentence"), FIRST[1::2])
def test_a_mistake_has_one_first_cause(
    pools: Pools, tmp_path: Path, name: str, cells: list[str], sentence: str
) -> None:
    require_first_cause(pools, tmp_path, name, cells, sentence)
