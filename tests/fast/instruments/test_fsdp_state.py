"""Private state of FSDP2: a version of torch that lacks an attribute is told in one line."""

from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from conformance.instruments import fsdp_state
from conformance.instruments.fsdp_state import gradient_divisors_of, managed_parameters, require_settings
from tests.support.one_rank import world_of_one_rank


def test_missing_settings_are_named_together() -> None:
    state = SimpleNamespace(_states_to_forward_prefetch=[])
    group = SimpleNamespace(fsdp_params=[], modules=(), mesh_info=SimpleNamespace(mesh=None))
    missing = (
        "FSDP2 has no SimpleNamespace._states_to_backward_prefetch, SimpleNamespace.post_forward_mesh_info, "
        "SimpleNamespace.shard_mesh_dim; adapt conformance.instruments.fsdp_state"
    )
    with pytest.raises(RuntimeError, match=missing):
        require_settings(state, group)


def test_parameters_that_were_loaded_in_the_place_of_shards_are_managed() -> None:
    """A model that transformers loads is sharded on the meta device, and gets its weights afterwards."""
    with world_of_one_rank():
        model = nn.Linear(2, 3)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for name, parameter in [*model.named_parameters()]:
            setattr(model, name, nn.Parameter(parameter.detach().clone()))
        assert managed_parameters(model) >= {id(parameter) for parameter in model.parameters()}


@pytest.mark.parametrize("divisor", [None, 3.0])
def test_divisors_of_gradients_are_read(divisor: float | None) -> None:
    with world_of_one_rank():
        model = nn.Linear(2, 3)
        sharded = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        if divisor:
            sharded.set_gradient_divide_factor(divisor)
        assert gradient_divisors_of(model) == {"": divisor}


def test_an_operator_that_holds_a_divisor_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups up to torch 2.7: the operator is unset by default."""
    with world_of_one_rank():
        model = nn.Linear(2, 3)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        for operator, raises in ((None, False), ("PREMUL_SUM", True)):
            group = SimpleNamespace(reduce_scatter_reduce_op=operator)
            monkeypatch.setattr(fsdp_state, "_groups", lambda _module, found=group: [found])
            if raises:
                with pytest.raises(RuntimeError, match="by what FSDP divides gradients"):
                    gradient_divisors_of(model)
            else:
                assert gradient_divisors_of(model) == {"": None}
