"""Bounds on samples: the right distribution stays inside of them, another scale or mean does not."""

import pytest
import torch

from conformance.oracles.initialisation import mean_bound, specified, spread_bounds
from reference_trainer.config import ModelConfig


@pytest.mark.parametrize("numel", [8, 64, 1000, 100_000])
def test_normal_samples_are_inside(numel: int) -> None:
    samples = torch.randn(200, numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(samples.mean(1).abs().max()) < mean_bound(numel)
    least, most = spread_bounds(numel)
    spreads = samples.square().mean(1)
    assert least < float(spreads.min())
    assert float(spreads.max()) < most


def test_a_wrong_scale_is_outside_of_a_matrix() -> None:
    """A standard deviation that is too large by half shows in 1024 elements."""
    samples = 1.5 * torch.randn(1024, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(samples.square().mean()) > spread_bounds(1024)[1]
    assert float((samples + 0.5).mean()) > mean_bound(1024)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("layers.0.attention_norm.weight", (1.0, 0.3)),
        ("norm.weight", (1.0, 0.3)),
        ("layers.0.attention.wk.bias", (0.0, 0.2)),
        ("layers.0.attention.wk.weight", (0.0, 0.1)),
        ("tok_embeddings.weight", (0.0, 0.1)),
    ],
)
def test_distribution_of_each_kind(name: str, expected: tuple[float, float]) -> None:
    assert specified(ModelConfig(init_std=0.1, bias_std=0.2, norm_std=0.3), name) == expected
