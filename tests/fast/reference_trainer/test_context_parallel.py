"""Context parallelism in the configuration: sizes that fit, and refusals with their remedies."""

import pytest
from msgspec.structs import replace

from reference_trainer.checks import UsageError
from reference_trainer.config import DataConfig, MeshConfig, ModelConfig, TrainerConfig
from reference_trainer.parallel_dims import check_fits_mesh, resolve_mesh

CONFIG = TrainerConfig(mesh=MeshConfig(dp_shard=4, cp=2), data=DataConfig(seq_len=64, global_batch_size=2))


def test_ranks_that_share_samples_need_no_samples_of_their_own() -> None:
    dims = resolve_mesh(CONFIG.mesh, world_size=4)
    check_fits_mesh(CONFIG, dims)
    assert (dims.dp, dims.sample_groups) == (4, 2)
    assert dims.mesh_shape() == {"dp_shard": 4}
    assert dims.context_mesh_shape() == {"samples": 2, "cp": 2, "tp": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"passes": 2, "accumulation": 2}, "mesh.cp 2 with passes 2: use mesh.cp=1, or passes 1"),
        ({"compile": "aot_eager"}, "mesh.cp 2 with compile aot_eager"),
        ({"model": ModelConfig(arithmetic="integer")}, "mesh.cp 2 with model.arithmetic integer"),
        ({"model": ModelConfig(n_experts=4)}, "mesh.cp 2 with model.n_experts 4"),
        ({"mesh": MeshConfig(pp=2, cp=2), "accumulation": 2}, "mesh.cp 2 with mesh.pp 2"),
    ],
)
def test_what_rings_do_not_go_with(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("mesh", "data", "message"),
    [
        (MeshConfig(dp_shard=4, cp=3), CONFIG.data, r"dp_shard 4 is not divisible by mesh\.cp 3"),
        (CONFIG.mesh, replace(CONFIG.data, seq_len=6), r"seq_len 6 is not divisible by 2 x mesh\.cp 2"),
        (
            CONFIG.mesh,
            replace(CONFIG.data, global_batch_size=3),
            "is not divisible by data-parallel ranks / mesh.cp 2 x",
        ),
    ],
)
def test_sizes_that_do_not_fit(mesh: MeshConfig, data: DataConfig, message: str) -> None:
    config = replace(CONFIG, mesh=mesh, data=data)
    with pytest.raises(UsageError, match=message):
        check_fits_mesh(config, resolve_mesh(config.mesh, world_size=4))
