"""Pipelines of the trainer: layers of each stage, and refused configurations."""

import pytest
import torch
from msgspec.structs import replace

from reference_trainer.config import MeshConfig, ModelConfig, PipelineConfig, ScheduleName, TrainerConfig
from reference_trainer.model import Transformer
from reference_trainer.parallel_dims import resolve_mesh
from reference_trainer.pipeline import check_pipeline, stage_layers, stages_of_rank
from reference_trainer.reshard import reshard_policy

SIX_LAYERS = ModelConfig(n_layers=6)
CONFIG = TrainerConfig(
    model=SIX_LAYERS, mesh=MeshConfig(pp=2, dp_shard=2), accumulation=4, pipeline=PipelineConfig(schedule="1f1b")
)


def checked(config: TrainerConfig) -> None:
    check_pipeline(config, resolve_mesh(config.mesh, world_size=4))


def scheduled(schedule: ScheduleName, **options: object) -> TrainerConfig:
    return replace(CONFIG, pipeline=PipelineConfig(schedule=schedule, **options))  # type: ignore[arg-type]


def test_stages_have_the_layers_in_between() -> None:
    stages = stage_layers(replace(CONFIG, model=replace(SIX_LAYERS, n_layers=5)), 2)
    assert [list(stage.layers) for stage in stages] == [[0, 1], [2, 3, 4]]
    assert [(stage.first, stage.last) for stage in stages] == [(True, False), (False, True)]


def test_cuts_are_those_that_are_given() -> None:
    stages = stage_layers(scheduled("1f1b", cuts=(5,)), 2)
    assert [list(stage.layers) for stage in stages] == [[0, 1, 2, 3, 4], [5]]


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [("1f1b", [[0], [1]]), ("looped-bfs", [[0, 2], [1, 3]]), ("zbv-zero-bubble", [[0, 3], [1, 2]])],
)
def test_stages_of_ranks(schedule: ScheduleName, stages: list[list[int]]) -> None:
    assert [stages_of_rank(scheduled(schedule), 2, pp_rank=rank) for rank in range(2)] == stages


def test_a_rank_holds_its_stages_under_the_names_of_the_full_model() -> None:
    names = {name for name, _ in Transformer(SIX_LAYERS).named_parameters()}
    stage_names = [
        {name for name, _ in Transformer(SIX_LAYERS, [stage]).named_parameters()} for stage in stage_layers(CONFIG, 2)
    ]
    assert set.union(*stage_names) == names
    assert not set.intersection(*stage_names)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(CONFIG, model=replace(SIX_LAYERS, n_layers=1)), "needs as many layers, but model.n_layers is 1"),
        (replace(CONFIG, accumulation=1), "set accumulation=2 or more"),
        (replace(scheduled("looped-bfs"), accumulation=5), "pass in rounds of mesh.pp 2; use a multiple"),
        (scheduled("1f1b", stages_per_rank=2), "which needs one stage per rank"),
        (scheduled("looped-bfs", stages_per_rank=1), "which needs two or more stages per rank"),
        (scheduled("1f1b", cuts=(1, 2)), "2 stages of 6 layers have 1 cuts"),
        (scheduled("1f1b", cuts=(6,)), "between 1 and 5"),
        (replace(CONFIG, model=replace(SIX_LAYERS, tied_embeddings=True)), "set model.tied_embeddings=false"),
        (replace(CONFIG, gradient_sync="last"), "leave gradient_sync out"),
        (replace(CONFIG, forward_prefetch=1), "set forward_prefetch=0"),
        (replace(scheduled("zbv-zero-bubble"), reshard="always"), "findings/zero_bubble_loses_gradients.py"),
        (replace(scheduled("zbv-zero-bubble"), activation_checkpointing="full"), "use activation_checkpointing none"),
        (replace(CONFIG, mesh=MeshConfig(dp_shard=4)), ""),
        (replace(scheduled("gpipe"), mesh=MeshConfig(dp_shard=4)), "pipeline has no effect with mesh.pp 1"),
    ],
)
def test_what_is_refused(config: TrainerConfig, message: str) -> None:
    if not message:
        checked(config)
        return
    with pytest.raises(ValueError, match=message):
        checked(config)


def test_a_schedule_that_torch_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.distributed.pipelining.ScheduleZBVZeroBubble")
    with pytest.raises(ValueError, match=r"has no torch\.distributed\.pipelining\.ScheduleZBVZeroBubble"):
        checked(scheduled("zbv-zero-bubble"))


def test_cuts_must_rise() -> None:
    with pytest.raises(ValueError, match="must rise"):
        PipelineConfig(cuts=(2, 2))


def test_the_default_keeps_groups_between_micro_batches() -> None:
    dims, device = resolve_mesh(CONFIG.mesh, world_size=4), torch.device("cpu")
    assert not any(reshard_policy(CONFIG, dims, device).after_forward.values())
    scarce = reshard_policy(replace(CONFIG, reshard="auto", memory_bytes=1), dims, device)
    assert all(scarce.after_forward.values())
    assert "auto: always" in scarce.reason
