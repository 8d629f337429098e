"""Calls of state dicts, checkpoints and pipelines with another argument on the last rank, or that it leaves out.

Right is what a call gives in which all ranks have the arguments of rank 0.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from conformance.sweeps.layouts import difference, gathered
from conformance.sweeps.odd_modules import in_parallel
from conformance.sweeps.rank_trials import OddCall, OddWorld

Keywords = dict[str, Any]


class Trained:
    """Sharded layers with AdamW after one step, and their full state."""

    def __init__(self, world: OddWorld) -> None:
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
        for number, parameter in enumerate(self.model.parameters()):
            parameter.data.copy_(torch.arange(parameter.numel()).view_as(parameter) % 7 - number)
        in_parallel(self.model, world, "0", "1")
        fully_shard(self.model, mesh=world.mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()
        self.before = self.gathered()

    def gathered(self) -> dict[str, Tensor]:
        """Return copies of the full parameters and of the optimizer's state. A collective."""
        return gathered(self.model, self.optimizer)

    @torch.no_grad()
    def change(self) -> None:
        """Change every value that a state dict must restore."""
        for parameter in self.model.parameters():
            parameter.mul_(-3.0)
            for value in self.optimizer.state[parameter].values():
                value.mul_(2.0)

    def wrong(self, kind: str = "") -> dict[str, str]:
        """Return the values that are not restored, of a `kind`: "model", "optimizer", or both if empty."""
        measured = self.gathered()
        names = [name for name in measured if not kind or ("/" in name) == (kind == "optimizer")]
        differences = {name: difference(measured[name], self.before[name], bound=0.0) for name in names}
        return {name: text for name, text in differences.items() if text}


def _restored(
    kind: str, common: Keywords | None = None, *, taking: Keywords | None = None, loading: Keywords | None = None
) -> OddCall:
    """Return a call that takes a state and loads it with common options, and on the odd rank with others as well."""

    def call(world: OddWorld) -> dict[str, str]:
        trained = Trained(world)
        taken, loaded = (
            StateDictOptions(**(common or {}), **((more or {}) if world.is_odd else {})) for more in (taking, loading)
        )
        held = (trained.model,) if kind == "model" else (trained.model, trained.optimizer)
        get: Any = get_model_state_dict if kind == "model" else get_optimizer_state_dict
        state = deepcopy(get(*held, options=taken))
        trained.change()
        _set(trained, kind, state, loaded)
        return trained.wrong(kind)

    return call


def _set(trained: Trained, kind: str, state: Any, options: StateDictOptions) -> None:
    if kind == "model":
        set_model_state_dict(trained.model, state, options=options)
    else:
        set_optimizer_state_dict(trained.model, trained.optimizer, state, options=options)


def _not_called(options: Keywords) -> OddCall:
    def call(world: OddWorld) -> dict[str, str]:
        trained = Trained(world)
        if not world.is_odd:
            get_state_dict(trained.model, trained.optimizer, options=StateDictOptions(**options))
        return {}

    return call


def _from_rank_0(world: OddWorld) -> dict[str, str]:
    """Load the state that rank 0 alone has, as get_state_dict gave it."""
    trained = Trained(world)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
    model, state = deepcopy(get_state_dict(trained.model, trained.optimizer, options=options))
    trained.change()
    set_state_dict(trained.model, trained.optimizer, model_state_dict=model, optim_state_dict=state, options=options)
    return trained.wrong()


def _with_key(*, missing: bool, options: Keywords) -> OddCall:
    """Return a call that loads a state with one key less, or more, on the odd rank."""

    def call(world: OddWorld) -> dict[str, str]:
        trained = Trained(world)
        state = deepcopy(get_model_state_dict(trained.model, options=StateDictOptions(**options)))
        trained.change()
        if world.is_odd and missing:
            state.pop("0.weight")
        elif world.is_odd:
            state["other"] = torch.ones(1)
        set_model_state_dict(trained.model, state, options=StateDictOptions(**options))
        return trained.wrong("model")

    return call


Save = Callable[[dict[str, Any], OddWorld], object]
Load = Callable[[dict[str, Any], OddWorld], object]


def _save(state: dict[str, Any], world: OddWorld, **options: Any) -> object:
    return save_checkpoint(state, checkpoint_id=world.directory / "checkpoint", **options)


def _load(state: dict[str, Any], world: OddWorld, **options: Any) -> object:
    load_checkpoint(state, checkpoint_id=world.directory / "checkpoint", **options)
    return None


def _file(save: Save = _save, load: Load = _load) -> OddCall:
    """Return a call that saves a model, changes it and loads it again."""

    def call(world: OddWorld) -> dict[str, str]:
        trained = Trained(world)
        save({"model": get_model_state_dict(trained.model)}, world)
        trained.change()
        state = {"model": get_model_state_dict(trained.model)}
        load(state, world)
        set_model_state_dict(trained.model, state["model"])
        return trained.wrong("model")

    return call


def _without_key(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": {name: value for name, value in state["model"].items() if name != "0.weight"}}


def _with_other_key(state: dict[str, Any]) -> dict[str, Any]:
    return {"model": {**state["model"], "other": torch.ones(2)}}


def _save_asynchronously(state: dict[str, Any], world: OddWorld) -> object:
    if world.is_odd:
        return None
    saving: Any = async_save(state, checkpoint_id=world.directory / "checkpoint")
    return saving.result()


def _saved_elsewhere(state: dict[str, Any], world: OddWorld) -> object:
    return save_checkpoint(state, checkpoint_id=world.directory / ("other" if world.is_odd else "checkpoint"))


def _loaded_elsewhere(state: dict[str, Any], world: OddWorld) -> object:
    load_checkpoint(state, checkpoint_id=world.directory / ("other" if world.is_odd else "checkpoint"))
    return None


_FULL = {"full_state_dict": True}
_FROM_RANK_0 = {"full_state_dict": True, "broadcast_from_rank0": True}

STATE_CALLS: Mapping[str, OddCall] = {
    "get_model_state_dict: full_state_dict": _restored("model", taking=_FULL),
    "get_model_state_dict: cpu_offload": _restored("model", taking={"cpu_offload": True}),
    "get_model_state_dict: cpu_offload of full": _restored("model", _FULL, taking={"cpu_offload": True}),
    "get_model_state_dict: ignore_frozen_params": _restored("model", taking={"ignore_frozen_params": True}),
    "get_model_state_dict: keep_submodule_prefixes": _restored("model", taking={"keep_submodule_prefixes": False}),
    "get_optimizer_state_dict: full_state_dict": _restored("optimizer", taking=_FULL),
    "get_optimizer_state_dict: flatten_optimizer_state_dict": _restored(
        "optimizer", taking={"flatten_optimizer_state_dict": True}
    ),
    "get_optimizer_state_dict: cpu_offload of full": _restored("optimizer", _FULL, taking={"cpu_offload": True}),
    "get_state_dict: full, not called": _not_called(_FULL),
    "get_state_dict: sharded, not called": _not_called({}),
    "set_model_state_dict: full_state_dict": _restored("model", loading=_FULL),
    "set_model_state_dict: strict": _restored("model", loading={"strict": False}),
    "set_model_state_dict: broadcast_from_rank0": _restored("model", _FULL, loading={"broadcast_from_rank0": True}),
    "set_model_state_dict: a key missing": _with_key(missing=True, options={}),
    "set_model_state_dict: a key of full missing": _with_key(missing=True, options=_FULL),
    "set_model_state_dict: a key missing, broadcast": _with_key(missing=True, options=_FROM_RANK_0),
    "set_model_state_dict: an unknown key": _with_key(missing=False, options={}),
    "set_model_state_dict: an unknown key, broadcast": _with_key(missing=False, options=_FROM_RANK_0),
    "set_optimizer_state_dict: full_state_dict": _restored("optimizer", loading=_FULL),
    "set_optimizer_state_dict: broadcast_from_rank0": _restored(
        "optimizer", _FULL, loading={"broadcast_from_rank0": True}
    ),
    "set_optimizer_state_dict: flatten_optimizer_state_dict": _restored(
        "optimizer", loading={"flatten_optimizer_state_dict": True}
    ),
    "set_state_dict: state of rank 0 alone": _from_rank_0,
    "save: a key missing": _file(lambda state, world: _save(_without_key(state) if world.is_odd else state, world)),
    "save: another key": _file(lambda state, world: _save(_with_other_key(state) if world.is_odd else state, world)),
    "save: checkpoint_id": _file(_saved_elsewhere),
    "save: no_dist": _file(lambda state, world: _save(state, world, no_dist=world.is_odd)),
    "save: use_collectives": _file(lambda state, world: _save(state, world, use_collectives=not world.is_odd)),
    "save: flatten_state_dict": _file(
        lambda state, world: _save(state, world, planner=DefaultSavePlanner(flatten_state_dict=not world.is_odd))
    ),
    "save: not called": _file(lambda state, world: None if world.is_odd else _save(state, world)),
    "async_save: not called": _file(_save_asynchronously),
    "load: a key missing": _file(
        load=lambda state, world: _load(_without_key(state) if world.is_odd else state, world)
    ),
    "load: a key that was not saved": _file(
        load=lambda state, world: _load(_with_other_key(state) if world.is_odd else state, world)
    ),
    "load: allow_partial_load": _file(
        load=lambda state, world: _load(
            _with_other_key(state), world, planner=DefaultLoadPlanner(allow_partial_load=world.is_odd)
        )
    ),
    "load: checkpoint_id": _file(load=_loaded_elsewhere),
    "load: no_dist": _file(load=lambda state, world: _load(state, world, no_dist=world.is_odd)),
    "load: not called": _file(load=lambda state, world: None if world.is_odd else _load(state, world)),
}
"""Calls of state dicts and checkpoints by their names."""


_BATCH, _WIDTH, _MICRO_BATCHES = 4, 3, 2


class _Layer(nn.Module):
    """Layer of a pipeline whose numbers are small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(float(_WIDTH * _WIDTH)).view(_WIDTH, _WIDTH) % 4 - 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute outputs of shape (samples, width)."""
        return x @ self.weight


def _inputs(rows: int = _BATCH) -> Tensor:
    return torch.arange(float(rows * _WIDTH)).view(rows, _WIDTH) % 5


def _pipelined(
    schedule: Callable[[bool], Any] = lambda _odd: ScheduleGPipe,
    *,
    micro_batches: Callable[[bool], int] = lambda _odd: _MICRO_BATCHES,
    rows: Callable[[bool], int] = lambda _odd: _BATCH,
    step: Callable[[Any, bool, tuple[Tensor, ...], Keywords], object] = lambda each, _odd, args, named: each.step(
        *args, **named
    ),
    stages: Callable[[OddWorld], int] = lambda world: world.size,
) -> OddCall:
    """Return a call that trains one step of a pipeline, with a layer on each rank, and compares weights' gradients."""

    def call(world: OddWorld) -> dict[str, str]:
        layer, odd = _Layer(), world.is_odd
        stage = PipelineStage(layer, world.rank, stages(world), torch.device("cpu"))
        each = schedule(odd)(stage, micro_batches(odd), loss_fn=_loss, scale_grads=False)
        arguments = (_inputs(rows(False)),) if world.rank == 0 else ()
        named = {"target": _inputs(rows(odd))} if odd else {}
        step(each, odd, arguments, named)
        layers = nn.Sequential(*(_Layer() for _ in range(world.size)))
        for inputs, target in zip(_inputs().chunk(_MICRO_BATCHES), _inputs().chunk(_MICRO_BATCHES), strict=True):
            loss: Tensor = _loss(layers(inputs), target)
            torch.autograd.backward(loss)
        expected = layers[world.rank].weight.grad
        assert isinstance(expected, Tensor)
        if layer.weight.grad is None:
            return {"gradient": "there is none"}
        text = difference(layer.weight.grad, expected, bound=0.0)
        return {"gradient": text} if text else {}

    return call


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).sum()


PIPELINE_CALLS: Mapping[str, OddCall] = {
    "schedule: class": _pipelined(lambda odd: Schedule1F1B if odd else ScheduleGPipe),
    "schedule: n_microbatches": _pipelined(micro_batches=lambda odd: 4 if odd else 2),
    "step: rows of the target": _pipelined(rows=lambda odd: 2 * _BATCH if odd else _BATCH),
    "step: not called": _pipelined(step=lambda each, odd, args, named: None if odd else each.step(*args, **named)),
    "step: eval called instead": _pipelined(
        step=lambda each, odd, args, named: each.eval(*args, **named) if odd else each.step(*args, **named)
    ),
    "PipelineStage: num_stages": _pipelined(stages=lambda world: world.size + world.is_odd),
}
"""Calls of pipelines by their names."""
