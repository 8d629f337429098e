"""Compiled models in the configuration: refusals with their remedies."""

import pytest
from msgspec.structs import replace

from reference_trainer.checks import UsageError
from reference_trainer.config import MeshConfig, TrainerConfig

CONFIG = TrainerConfig(compile="aot_eager", compiled="model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"compile": "none"},
            "compiled model with compile none: use compiled blocks, or compile inductor or aot_eager",
        ),
        ({"mesh": MeshConfig(tp=2)}, "compiled model with mesh.tp 2"),
        ({"mesh": MeshConfig(pp=2), "accumulation": 2}, "compiled model with mesh.pp 2"),
        ({"float8": "rowwise", "precision": "bf16-mp"}, "compiled model with float8 rowwise"),
        ({"precision": "bf16-mixed"}, "precision bf16-mixed with compile aot_eager"),
    ],
)
def test_what_a_compiled_model_does_not_go_with(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        replace(CONFIG, **changes)
