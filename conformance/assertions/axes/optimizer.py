"""Proof that a run has the optimizer, and the implementation of it, that its cell asks for."""

from conformance.assertions.axes.differences import expect, operators
from conformance.run.record import Record

_STATE = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "adamw-foreach": {"exp_avg", "exp_avg_sq"},
    "adamw-fused": {"exp_avg", "exp_avg_sq"},
    "sgd": set[str](),
    "sgd-momentum": {"momentum_buffer"},
}
"""Keys of the state of a parameter's size, by optimizer."""
_UPDATES = {"aten::addcdiv_": "for-loop", "aten::_foreach_addcdiv_": "foreach", "aten::_fused_adamw_": "fused"}
"""Implementation of AdamW by the operator that changes the parameters; see torch/optim/adam.py."""


def optimizer_takes_effect(record: Record, neighbour: Record) -> None:
    """Compare the optimizer's state, and the operators of its steps. Raises ConformanceFailure, see `proofs.Proof`."""
    for run in (record, neighbour):
        state, expected = _state(run), _STATE[run.cell.optimizer]
        expect(state == expected, f"{run.cell.id}: state is {sorted(state)}, not {sorted(expected)}")
    used, usual = _implementations(record), _implementations(neighbour)
    wanted = {"adamw-foreach": {"foreach"}, "adamw-fused": {"fused"}}.get(record.cell.optimizer, set())
    expect(used == wanted, f"AdamW steps with {sorted(used)}, not {sorted(wanted)}")
    chosen = {"foreach"} if record.device_type != "cpu" and record.cell.offload == "none" else {"for-loop"}
    expect(usual == chosen, f"AdamW by default steps with {sorted(usual)}, not {sorted(chosen)}")


def _state(record: Record) -> set[str]:
    keys = (key.split("/") for facts in record.ranks for key in facts.fingerprints)
    return {kind for when, kind, _ in keys if when == "final"} - {"parameter", "buffer"}


def _implementations(record: Record) -> set[str]:
    return {_UPDATES[name] for name in operators(record, "optimizer") if name in _UPDATES}
