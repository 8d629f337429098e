"""OFF-2 on facts of a machine with a GPU, which the CPU cannot show; and the instrument that reads these facts."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import FSDPModule

from conformance.instruments.fsdp_state import offloading_of
from conformance.laws.numerics import test_off as laws
from conformance.oracles.dtype_policy import expected_offloading, expected_places
from conformance.outcomes import ConformanceFailure
from conformance.plan.cells import Cell

HOST = {"optimizer_state/exp_avg/w": "cpu"}
PINNED = {
    "initial_parameter/w": "cpu pinned",
    "final_parameter/w": "cpu pinned",
    "gradient/w": "cpu pinned",
}
DEVICE = {"unsharded_parameter/w": "cuda", "initial_buffer/t": "cuda", "logits": "cuda", "matmul/forward": "cuda"}


def judge(cell: Cell, **changes: str) -> None:
    """Judge OFF-2 on a rank whose tensors are in the right places, with changes."""
    if cell.offload == "cpu":
        places = HOST | (PINNED if cell.pin_memory else dict.fromkeys(PINNED, "cpu")) | DEVICE
    else:
        places = dict.fromkeys([*HOST, *PINNED, *DEVICE], "cuda")
    offloading = expected_offloading(cell.config)
    offloading |= {name: value for name, value in changes.items() if name in offloading}
    places |= {name: value for name, value in changes.items() if name not in offloading}
    seen = {thing: [place] for thing, place in places.items()}
    facts = SimpleNamespace(rank=0, mesh_coordinate={}, offloading=offloading, places=seen)
    record: Any = SimpleNamespace(cell=cell, ranks=[facts], shards=[{}], device_type="cuda")
    run: Any = lambda _cell: record  # noqa: E731
    laws.test_cpu_offload_state_is_in_host_memory(run, cell)


CELLS = [Cell(), Cell(offload="cpu"), Cell(offload="cpu", pin_memory=True)]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.id)
def test_state_in_the_right_places_passes(cell: Cell) -> None:
    judge(cell)


@pytest.mark.parametrize("thing", [*HOST, *PINNED])
def test_state_left_on_the_device_fails(thing: str) -> None:
    with pytest.raises(ConformanceFailure, match=rf"{thing} is \['cuda'\], expected \['cpu'\]"):
        judge(CELLS[1], **{thing: "cuda"})


@pytest.mark.parametrize("thing", DEVICE)
def test_what_is_used_on_the_device_must_not_be_on_the_host(thing: str) -> None:
    for cell in CELLS:
        with pytest.raises(ConformanceFailure, match=rf"{thing} is \['cpu'\], expected \['cuda'\]"):
            judge(cell, **{thing: "cpu"})


@pytest.mark.parametrize("thing", PINNED)
def test_memory_that_is_not_pinned_fails(thing: str) -> None:
    with pytest.raises(ConformanceFailure, match=rf"{thing} is \['cpu'\], expected \['cpu pinned'\]"):
        judge(CELLS[2], **{thing: "cpu"})


@pytest.mark.parametrize(("cell", "policy"), [(CELLS[0], "cpu"), (CELLS[1], "none"), (CELLS[2], "cpu")])
def test_a_group_with_another_policy_fails(cell: Cell, policy: str) -> None:
    with pytest.raises(ConformanceFailure, match=f"norm.weight is {policy}, expected "):
        judge(cell, **{"norm.weight": policy})


def test_expected_places_are_those_of_the_recorded_kinds() -> None:
    config = CELLS[1].config
    assert expected_places(config, ["gradient/w", "rope_table/x/forward"], device="cuda") == {
        "gradient/w": ["cpu"],
        "rope_table/x/forward": ["cuda"],
    }


@pytest.mark.parametrize(
    ("state", "missing"),
    [
        ({"_fsdp_param_groups": [SimpleNamespace(fsdp_params=[SimpleNamespace(pin_memory=True)])]}, "offload_to_cpu"),
        ({"_fsdp_param_groups": [SimpleNamespace(params=[])]}, "fsdp_params"),
        ({"groups": []}, "_fsdp_param_group"),
    ],
)
def test_a_torch_that_keeps_the_policy_elsewhere_is_named(state: dict[str, Any], missing: str) -> None:
    class Managed(FSDPModule, nn.Linear):
        def __new__(cls, *_args: Any) -> Any:
            return object.__new__(cls)

        def _get_fsdp_state(self) -> Any:
            return SimpleNamespace(**state)

    with pytest.raises(
        RuntimeError, match=rf"^torch .* no attribute '{missing}'; adapt conformance\.instruments\.fsdp_state"
    ):
        offloading_of(Managed(1, 1))
