"""Taps made up for tests of their readers."""

from typing import Any

from torch import Tensor

from conformance.instruments.taps import Tap


def tap_of(tensor: Tensor, **fields: Any) -> Tap:
    """Return the tap of a tensor, by default a module's output in fp32."""
    fixed: dict[str, Any] = {"module": "m", "kind": "output", "item": "0", "call": 0, "step": 0, "dtype": "float32"}
    fixed |= {"placements": None, "collectives": 0, "called": 0, "value": 0}
    return Tap(shape=list(tensor.shape), **(fixed | fields))
