"""Version traits: each version of torch has those of the releases around it, under any name of its build."""

import pytest

from conformance.oracles.dtype_policy import unset_reduce_dtype
from conformance.oracles.torch_versions import (
    FROM_2_15,
    UP_TO_2_8,
    UP_TO_2_9,
    UP_TO_2_11,
    UP_TO_2_12,
    UP_TO_2_14,
    VersionTraits,
    traits_of,
)


@pytest.mark.parametrize(
    ("torch_version", "traits", "reduce_dtype"),
    [
        ("2.6.0", UP_TO_2_8, "bfloat16"),
        ("2.8.0+cu126", UP_TO_2_8, "bfloat16"),
        ("2.9.1", UP_TO_2_9, "bfloat16"),
        ("2.10.0", UP_TO_2_11, "bfloat16"),
        ("2.12.1", UP_TO_2_12, "bfloat16"),
        ("2.13.0+cpu", UP_TO_2_14, "bfloat16"),
        ("2.14.0", UP_TO_2_14, "bfloat16"),
        ("2.15.0.dev20261122", FROM_2_15, "float32"),
        ("2.15.0a0+gitc0ffee", FROM_2_15, "float32"),
        ("3.0", FROM_2_15, "float32"),
    ],
)
def test_traits_by_version(torch_version: str, traits: VersionTraits, reduce_dtype: str) -> None:
    assert traits_of(torch_version) == traits
    assert unset_reduce_dtype(torch_version) == reduce_dtype


def test_a_text_that_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match="Invalid version: 'main'"):
        traits_of("main")
