"""State dicts of torch.distributed.checkpoint, in each form that its options have: taken, loaded and trained on."""

from collections.abc import Collection
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from conformance.experiments.context import RankWorld, experiment
from conformance.experiments.fsdp_net import Wrong
from conformance.instruments.sharding import full, local
from conformance.run.experiment import Needs
from reference_trainer.train import Trainer

_FORMS = {
    "sharded": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "offloaded": StateDictOptions(cpu_offload=True),
    "broadcast": StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True),
}
_NOT_STRICT = {
    "not strict": StateDictOptions(strict=False),
    "full, not strict": StateDictOptions(full_state_dict=True, strict=False),
}
_LEFT_OUT, _ADDED = "layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w9.weight"


@experiment(needs=Needs.TRAINING)
def use_state_dicts(rank: RankWorld) -> dict[str, Wrong]:
    """Load the state after one step, in each form, into a trainer with another state; at last, train the next step.

    Each form's counts are of tensors or options of this rank that are wrong.
    """
    source, target = rank.trainer(), rank.trainer()
    source.train_step(0)
    # Of an optimizer without state torch 2.13 loads no full state dict: "Expected device to be set".
    forms = {form: of for form, of in _FORMS.items() if source.optimizer.state or not of.full_state_dict}
    taken = {form: _taken(source, options) for form, options in forms.items()}
    before, gathered, schedule = _state(source), _gathered(source), deepcopy(source.schedule.state_dict())
    source.train_step(1)
    after = _state(source)
    wrong = {}
    for form, options in forms.items():
        model, optimizer = taken[form]
        content = _wrong_content(model, gathered, options, rank=rank.rank)
        _change(target)
        # One by one: set_state_dict hangs, see findings/broadcast_of_states_skipped_by_other_ranks.py.
        set_model_state_dict(target.model, model, options=options)
        set_optimizer_state_dict(target.model, target.optimizer, optimizer, options=options)
        wrong[form] = {"content": content, "loaded": _differing(_state(target), before)}
    target.schedule.load_state_dict(schedule)
    target.train_step(1)
    wrong["next step"] = {"state": _differing(_state(target), after)}
    for form, options in _NOT_STRICT.items():
        wrong[form] = _load_with_other_keys(source, target, options)
    return wrong


@experiment(needs=Needs.TRAINING)
def take_state_dict_before_training(rank: RankWorld) -> dict[str, int]:
    """Train a step after the state of an untrained model and optimizer was taken, and compare with a run without that.

    Returns the number of this rank's values that differ after the step: by kind of optimizer state, of parameters, and
    of options of groups.
    """
    plain, saved = rank.trainer(), rank.trainer()
    _taken(saved, StateDictOptions())
    for trainer in (plain, saved):
        trainer.train_step(0)
    expected, measured = _state(plain), _state(saved)
    parameters = {name for name, _ in plain.model.named_parameters()}
    wrong = dict.fromkeys({_kind(name, parameters) for name in expected}, 0)
    for name in expected.keys() | measured.keys():
        differs = name not in expected or name not in measured or not _same(measured[name], expected[name])
        wrong[_kind(name, parameters)] = wrong.get(_kind(name, parameters), 0) + differs
    return wrong


def _kind(name: str, parameters: Collection[str]) -> str:
    """Return the kind of a value of `_state`."""
    if name in parameters:
        return "parameters"
    return "options" if name.startswith("group ") else name.rpartition("/")[2]


def _taken(trainer: Trainer, options: StateDictOptions) -> Any:
    """Return copies of the states of model and optimizer."""
    return deepcopy(get_state_dict(trainer.model, trainer.optimizer, options=options))


def _state(trainer: Trainer) -> dict[str, Any]:
    """Return copies of this rank's shards of parameters and optimizer state, and the options of each group."""
    state: dict[str, Any] = {}
    for name, parameter in trainer.model.named_parameters():
        state[name] = local(parameter).clone()
        for kind, value in trainer.optimizer.state[parameter].items():
            state[f"{name}/{kind}"] = local(value).clone()
    for index, group in enumerate(trainer.optimizer.param_groups):
        state.update({f"group {index}/{key}": value for key, value in group.items() if key != "params"})
    return state


def _gathered(trainer: Trainer) -> dict[str, Tensor]:
    return {name: full(parameter.detach()).clone() for name, parameter in trainer.model.named_parameters()}


@torch.no_grad()
def _change(trainer: Trainer) -> None:
    """Change all values that a state dict must restore."""
    trainer.optimizer.state.clear()
    for parameter in trainer.model.parameters():
        local(parameter).mul_(0.5).add_(1.0)
    for group in trainer.optimizer.param_groups:
        group.update(lr=3.0 * group["lr"], weight_decay=group["weight_decay"] + 1.0)


def _wrong_content(model: dict[str, Any], gathered: dict[str, Tensor], options: StateDictOptions, *, rank: int) -> int:
    """Count the parameters of a model's state that are not as the options say."""
    if options.full_state_dict and options.cpu_offload and rank:
        return len(model)
    if not options.full_state_dict:
        kept = {name: full(tensor.to(gathered[name].device)) for name, tensor in model.items()}
        return _differing(kept, gathered)
    plain = {name: tensor for name, tensor in model.items() if not isinstance(tensor, DTensor)}
    return _differing({name: tensor.to(gathered[name].device) for name, tensor in plain.items()}, gathered)


def _differing(measured: dict[str, Any], expected: dict[str, Any]) -> int:
    """Count the names whose values differ in a bit, or which one side lacks."""
    names = measured.keys() & expected.keys()
    return len(measured.keys() ^ expected.keys()) + sum(not _same(measured[name], expected[name]) for name in names)


def _same(measured: Any, expected: Any) -> bool:
    """Return whether values are the same in every bit; torch may make a list of a tuple, such as `betas`."""
    if isinstance(expected, Tensor):
        return isinstance(measured, Tensor) and measured.dtype == expected.dtype and torch.equal(measured, expected)
    if isinstance(expected, tuple):
        return list(measured) == list(expected)
    return bool(measured == expected)


def _load_with_other_keys(source: Trainer, target: Trainer, options: StateDictOptions) -> Wrong:
    """Load a model's state that lacks one parameter and has another too many, with options that are not strict."""
    model, _ = _taken(source, options)
    model[_ADDED] = model.pop(_LEFT_OUT)
    _change(target)
    expected = {name: local(p).clone() for name, p in source.model.named_parameters()}
    expected[_LEFT_OUT] = local(target.model.get_parameter(_LEFT_OUT)).clone()
    keys = set_model_state_dict(target.model, model, options=options)
    measured = {name: local(p) for name, p in target.model.named_parameters()}
    # Of a full state dict torch 2.13 reports no missing key, see findings/missing_keys_of_full_state_dict.py.
    missing = [] if options.full_state_dict else [_LEFT_OUT]
    unreported = int(keys.missing_keys != missing) + int(keys.unexpected_keys != [_ADDED])
    return {"loaded": _differing(measured, expected), "unreported keys": unreported}
