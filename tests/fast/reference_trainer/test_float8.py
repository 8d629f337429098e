"""Float8 in the configuration: refusals with their remedies, and layers whose sizes kernels take."""

import builtins
from typing import Any

import pytest
from msgspec.structs import replace
from torch import nn

from reference_trainer.checks import UsageError
from reference_trainer.config import MeshConfig, ModelConfig, TrainerConfig
from reference_trainer.float8 import fits, require_torchao
from reference_trainer.parallel_dims import check_fits_mesh, resolve_mesh

CONFIG = TrainerConfig(mesh=MeshConfig(dp_shard=2), float8="tensorwise")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": MeshConfig(tp=2)}, "float8 tensorwise with mesh.tp 2: use float8 none, or mesh.tp 1"),
        ({"model": ModelConfig(n_experts=4)}, "float8 tensorwise with model.n_experts 4"),
        ({"model": ModelConfig(arithmetic="integer")}, "float8 tensorwise with model.arithmetic integer"),
        ({"offload": "cpu"}, "float8 tensorwise with offload cpu: use float8 rowwise, or offload none"),
        ({"reshard": 2}, r"float8 tensorwise with reshard to \[2\] ranks"),
        ({"reshard": {r"layers\..*": 2}}, r"float8 tensorwise with reshard to \[2\] ranks"),
    ],
)
def test_what_float8_does_not_go_with(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.parametrize("changes", [{"offload": "cpu"}, {"reshard": 2}])
def test_scales_of_rows_go_with_more(changes: dict[str, Any]) -> None:
    replace(CONFIG, float8="rowwise", **changes)


def test_shards_that_would_need_padding_are_refused() -> None:
    dims = resolve_mesh(MeshConfig(dp_shard=3), world_size=3)
    config = replace(CONFIG, mesh=MeshConfig(dp_shard=3), data=replace(CONFIG.data, global_batch_size=3))
    with pytest.raises(UsageError, match=r"model.dim 128, model.ffn_dim 256, .* evenly among mesh.dp_shard 3"):
        check_fits_mesh(config, dims)
    check_fits_mesh(replace(config, float8="rowwise"), dims)
    # Sizes that kernels do not take are gathered as they are.
    check_fits_mesh(replace(config, model=ModelConfig(dim=48, ffn_dim=100, n_kv_heads=4)), dims)


def test_layers_that_kernels_take() -> None:
    assert fits(nn.Linear(32, 48))
    assert not fits(nn.Linear(32, 40))
    assert not fits(nn.Linear(40, 32))
    assert not fits(nn.Embedding(32, 32))


def test_missing_torchao_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without_torchao(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torchao"):
            raise ModuleNotFoundError("No module named 'torchao'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_torchao)
    with pytest.raises(
        UsageError, match=r"float8 rowwise needs torchao, .* No module named 'torchao'; install a torchao"
    ):
        require_torchao("rowwise")
