"""Options of state dicts, any two or three together: taken and loaded three times, and compared with known values."""

import gc
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from conformance.covering_arrays.combinations import Rule
from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from conformance.sweeps.checkpoint_models import LAYOUTS, Training, frozen_names, value_of
from conformance.sweeps.checkpoints import Groups, fault, spoiled, sweep_rows
from conformance.sweeps.covering_sweep import Options, forbids, needs
from conformance.sweeps.trials import Swept

TIMES = 3
_BEFORE = 40
"""Time whose values a target has before it loads any."""
AXES: Mapping[str, tuple[Any, ...]] = {
    "full_state_dict": (False, True),
    "cpu_offload": (False, True),
    "ignore_frozen_params": (False, True),
    "keep_submodule_prefixes": (True, False),
    "strict": (True, False),
    "broadcast_from_rank0": (False, True),
    "flatten_optimizer_state_dict": (False, True),
    "dsd_fqn_modifiers": ("_fqn_modifiers", "renamed_keys"),
    "functions": ("one by one", "together", "model alone"),
    "submodules": (False, True),
    "optimizer": (
        *("AdamW", "AdamW, groups", "AdamW, tensor lr", "momentum", "SGD", "two", "AdamW, empty group", "nested"),
        *("rateless", "none"),
    ),
    "unused": ("nothing", "by the source", "by the target"),
    "tied": (False, True, "modules"),
    "frozen": (False, True),
    "renaming": (False, True),
    "compiled": (False, True),
    "collects": (True, False),
    "through": ("memory", "files"),
    "into": ("a trained model", "a new model", "a model with gradients", "a model on meta"),
}
"""Values of each option but the layout, which depends on the mesh; the first is the default."""
_FIELDS = tuple(field.name for field in fields(StateDictOptions))
RULES: tuple[Rule, ...] = (
    *needs(
        AXES,
        ("broadcast_from_rank0", "full_state_dict", True),
        # findings/broadcast_of_states_skipped_by_other_ranks.py
        ("broadcast_from_rank0", "functions", "one by one", "model alone"),
        # Without an optimizer there is none whose state could be taken alone, nor state that a parameter could lack.
        ("optimizer", "functions", "one by one", "together"),
        ("unused", "functions", "one by one", "together"),
        # Documented: with `strict` each parameter needs the state that it would have.
        ("unused", "strict", False),
        ("keep_submodule_prefixes", "submodules", True),
        ("submodules", "strict", False),
        # A state of one submodule without its prefix is loaded by the module itself.
        ("full_state_dict", "submodules", False),
        ("ignore_frozen_params", "strict", False),
        # State of an optimizer has the module's own name of such a parameter, and is not found under the other.
        ("renaming", "functions", "model alone"),
        # Rank 0 alone has such a state.
        ("through", "full_state_dict", False),
    ),
    forbids("optimizer", "functions", when=lambda optimizer, calls: optimizer == "none" and calls == "one by one"),
    forbids("optimizer", "unused", when=lambda optimizer, unused: optimizer == "none" and unused != "nothing"),
    # Tensors on meta are replaced by those of a full state dict alone.
    forbids("into", "full_state_dict", when=lambda into, full: into == "a model on meta" and not full),
    forbids("into", "functions", when=lambda into, calls: into == "a model on meta" and calls != "model alone"),
    forbids("into", "ignore_frozen_params", when=lambda into, ignore: into == "a model on meta" and ignore),
)
REFUSALS: tuple[Options, ...] = (
    # Taking a state calls the method of the default name alone.
    {"renaming": True, "functions": "model alone", "dsd_fqn_modifiers": "renamed_keys"},
    # A full state of an optimizer without any: "Expected device to be set".
    *({"full_state_dict": True, "optimizer": "SGD", "functions": calls} for calls in ("one by one", "together")),
)
"""Options that torch refuses; any other error is a fault."""
SUSPECTS: tuple[Options, ...] = (
    *REFUSALS,
    # findings/full_flattened_optimizer_state.py
    *(
        {"full_state_dict": True, "flatten_optimizer_state_dict": True, "functions": functions}
        for functions in ("one by one", "together")
    ),
    # findings/flattened_state_of_no_state.py
    *(
        {"flatten_optimizer_state_dict": True, "optimizer": "SGD", "functions": functions}
        for functions in ("one by one", "together")
    ),
    # findings/flattened_state_of_empty_group.py
    *(
        {"flatten_optimizer_state_dict": True, "optimizer": "AdamW, empty group", "functions": functions}
        for functions in ("one by one", "together")
    ),
    # findings/full_state_into_model_with_gradients.py
    *(
        {"full_state_dict": True, "functions": functions, "into": "a model with gradients"}
        for functions in ("one by one", "together")
    ),
    # findings/flattened_state_lost_beside_gradients.py
    *(
        {"flatten_optimizer_state_dict": True, "functions": functions, "into": "a model with gradients"}
        for functions in ("one by one", "together")
    ),
    # findings/state_of_submodule_without_frozen_parameters.py
    *(
        {
            "ignore_frozen_params": True,
            "strict": False,
            "functions": functions,
            "submodules": True,
            "frozen": True,
        }
        for functions in AXES["functions"]
    ),
    # findings/module_of_two_names.py
    {"full_state_dict": True, "tied": "modules"},
    {"compiled": True, "tied": "modules"},
    # findings/full_state_of_a_parameter_without_state.py
    *(
        {"full_state_dict": True, "strict": False, "functions": functions, "unused": unused}
        for functions in ("one by one", "together")
        for unused in ("by the source", "by the target")
    ),
    # findings/flattened_state_of_a_parameter_without_state.py
    *(
        {"flatten_optimizer_state_dict": True, "strict": False, "functions": functions, "unused": unused}
        for functions in ("one by one", "together")
        for unused in ("by the source", "by the target")
    ),
    # findings/tied_weights_loaded_into_meta_model.py
    {"full_state_dict": True, "functions": "model alone", "tied": True, "into": "a model on meta"},
)
"""Options that torch refuses or gets wrong: tried first, since narrowing a row down takes long."""


class Case:
    """Row of options on a mesh."""

    def __init__(self, options: Options, mesh: DeviceMesh, directory: Path, group: Any) -> None:
        self._options, self._directory, self._group = options, directory, group
        self._source = Training(options, mesh, unused=options["unused"] == "by the source")
        self._source.begin()
        self._target = self._new_target(mesh)
        self._given = StateDictOptions(**{name: options[name] for name in _FIELDS})

    def _new_target(self, mesh: DeviceMesh) -> Training:
        into = self._options["into"]
        unused = self._options["unused"] == "by the target"
        target = Training(self._options, mesh, meta=into == "a model on meta", unused=unused)
        if into == "a trained model":
            target.begin()
        if into != "a model on meta":
            target.write(_BEFORE)
        if into == "a model with gradients":
            target.add_gradients()
        return target

    @property
    def _has_optimizer(self) -> bool:
        return bool(self._options["functions"] != "model alone")

    def faults(self) -> dict[str, str]:
        """Take and load the states of three times; returns the first differences.

        Functions of states leave the collection of garbage enabled or disabled, as it was.
        """
        was_enabled, collects = gc.isenabled(), self._options["collects"]
        (gc.enable if collects else gc.disable)()
        try:
            found = self._faults()
            if gc.isenabled() != collects:
                found["collector"] = f"enabled: {gc.isenabled()}, expected {collects}"
        finally:
            (gc.enable if was_enabled else gc.disable)()
        return found

    def _faults(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for time in range(TIMES):  # to the end on every rank: taking and loading are collective
            self._source.write(time)
            model, optimizer = self._taken()
            wrong = self._wrong_content(model, optimizer, time)
            self._source.write(time + 1)  # a state in memory was copied, as by a checkpoint
            model, optimizer = self._stored(model, optimizer, time)
            self._load(model, optimizer)
            if not self._given.broadcast_from_rank0:  # nothing, as a rank has of what another one offloads
                set_model_state_dict(self._target.module, {}, options=replace(self._given, strict=False))
            found = {**wrong, **self._wrong_target(time), **found}
        return found

    def _taken(self) -> tuple[dict[str, Any], dict[str, Any]]:
        module, optimizers = self._source.module, self._source.optimizers
        given: dict[str, Any] = {"options": self._given}
        if self._options["submodules"]:
            given["submodules"] = {self._source.model.first}
        if self._options["functions"] == "together":
            return deepcopy(get_state_dict(module, optimizers, **given))
        model = get_model_state_dict(module, **given)
        optimizer = get_optimizer_state_dict(module, optimizers, **given) if self._has_optimizer else {}
        return deepcopy((model, optimizer))

    def _stored(self, model: dict[str, Any], optimizer: dict[str, Any], time: int) -> tuple[Any, Any]:
        """Return the state as the target gets it: from files, and a state that rank 0 alone has on all ranks."""
        if self._options["through"] == "files":
            folder = self._directory / f"{time}"
            save({"model": model, "optimizer": optimizer}, checkpoint_id=folder, process_group=self._group)
            # The target's own state dict would have been taken before; any tensors of its layout will do.
            state = spoiled({"model": model, "optimizer": optimizer})
            load(state, checkpoint_id=folder, process_group=self._group)
            return state["model"], state["optimizer"]
        if self._given.broadcast_from_rank0:
            return (model, optimizer) if dist.get_rank() == 0 else ({}, {})
        if self._given.full_state_dict and self._given.cpu_offload:
            states = [model, optimizer]
            dist.broadcast_object_list(states, group=self._group)
            return states[0], states[1]
        return model, optimizer

    def _load(self, model: dict[Any, Any], optimizer: dict[str, Any]) -> None:
        target, given = self._target, self._given
        if self._options["submodules"] and not given.keep_submodule_prefixes:
            model = {target.model.first: model}
        if self._options["functions"] == "together":
            set_state_dict(
                target.module, target.optimizers, model_state_dict=model, optim_state_dict=optimizer, options=given
            )
            return
        set_model_state_dict(target.module, model, options=given)
        if self._has_optimizer:
            set_optimizer_state_dict(target.module, target.optimizers, optimizer, options=given)

    def _expected_model(self, time: int) -> dict[str, Any]:
        """Return the full values by the keys that the options ask for."""
        source, aliases = self._source, self._source.aliases()
        tensors = dict(source.tensors())
        expected: dict[str, Any] = {"_extra_state": {"extra": time}}
        kept = {*source.model.state_dict()} - {"_extra_state"}
        for key in kept:
            path = f"model/{aliases.get(key, key)}"
            expected[key] = value_of(path, time, tensors[path])
        if self._given.ignore_frozen_params:
            expected = {key: value for key, value in expected.items() if key not in frozen_names(source)}
        if self._options["submodules"]:
            begin = "" if self._given.keep_submodule_prefixes else "first."
            expected = {k.removeprefix(begin): v for k, v in expected.items() if k.startswith("first.")}
        return expected

    def _expected_optimizer(self, time: int) -> dict[str, Any]:
        """Return full values and options, flat or nested as the options ask for."""
        nested: dict[str, Any] = {}
        flat: dict[str, Any] = {}
        for path, tensor in self._source.tensors():
            kind, _, rest = path.partition("/")
            if kind == "state":
                name, _, what = rest.rpartition("/")
                *keys, last = what.split(".")
                inner = reduce(lambda each, key: each.setdefault(key, {}), keys, nested.setdefault(name, {}))
                inner[last] = flat[f"state.{name}.{what}"] = value_of(path, time, tensor)
        if not self._source.optimizers:
            return {}
        groups = self._source.groups(time)
        for group in groups:
            for name in group["params"]:
                flat |= {f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"}
        return flat if self._given.flatten_optimizer_state_dict else {"state": nested, "param_groups": groups}

    def _wrong_content(self, model: dict[str, Any], optimizer: dict[str, Any], time: int) -> dict[str, str]:
        given = self._given
        if given.full_state_dict and given.cpu_offload and dist.get_rank():
            return {"content": f"rank {dist.get_rank()} has {[*model, *optimizer]}"} if model or optimizer else {}
        found = _unequal(model, self._expected_model(time), is_full=given.full_state_dict)
        if not found and self._has_optimizer:
            found = _unequal(optimizer, self._expected_optimizer(time), is_full=given.full_state_dict)
        return {"content": f"time {time}: {found}"} if found else {}

    def _wrong_target(self, time: int) -> dict[str, str]:
        """Return a value that the target has not loaded, or has lost although the state does not have it."""
        target, options = self._target, self._options
        loaded = self._loaded_names(time)
        source_names = {path for path, _ in self._source.tensors()}
        for path, tensor in target.tensors():
            if path.endswith("scratch") and tensor.is_meta:
                continue
            when = time if path in loaded else _BEFORE
            if text := fault(tensor, value_of(path, when, tensor)):
                return {"loaded": f"time {time}: {path}: {text}"}
        if target.model.extra != (time if "model/_extra_state" in loaded else _BEFORE):
            return {"loaded": f"time {time}: the extra state is {target.model.extra}"}
        if not self._has_optimizer:
            return {}
        missing = source_names - {path for path, _ in target.tensors()}
        if missing:
            return {"loaded": f"time {time}: there is no {sorted(missing)[0]}"}
        if added := target.names_with_state() - self._source.names_with_state():
            return {"state": f"time {time}: an entry for {sorted(added)[0]}"}
        if text := _unequal(target.groups(), self._source.groups(time), is_full=False):
            return {"groups": f"{options['optimizer']}, time {time}: {text}"}
        return {}

    def _loaded_names(self, time: int) -> set[str]:
        """Return the paths of the tensors that a state has."""
        keys = self._expected_model(time).keys()
        prefix = "" if self._given.keep_submodule_prefixes else "first."
        aliases = self._source.aliases()
        names = {f"model/{aliases.get(prefix + key, prefix + key)}" for key in keys}
        states = {path for path, _ in self._source.tensors() if path.startswith("state/")}
        return names | (states if self._has_optimizer else set())


def _unequal(measured: Any, expected: Any, *, is_full: bool, path: str = "") -> str:
    """Return the first value that differs, with its path; a list equals a tuple, as for `betas`."""
    if isinstance(expected, Mapping):
        if not isinstance(measured, Mapping) or measured.keys() != expected.keys():
            return f"{path}: keys {_keys(measured)}, expected {_keys(expected)}"
        pairs: Iterator[tuple[Any, Any, Any]] = ((key, measured[key], expected[key]) for key in expected)
    elif isinstance(expected, (list, tuple)):
        if not isinstance(measured, (list, tuple)) or len(measured) != len(expected):
            return f"{path}: {measured!r:.80}, expected {expected!r:.80}"
        pairs = zip(range(len(expected)), measured, expected, strict=True)
    else:
        if is_full and isinstance(measured, DTensor):
            return f"{path}: a DTensor in a full state dict"
        text = fault(measured, expected)
        return f"{path}: {text}" if text else ""
    differences = (_unequal(one, other, is_full=is_full, path=f"{path}/{key}") for key, one, other in pairs)
    return next(filter(None, differences), "")


def _keys(value: Any) -> str:
    return str(sorted(map(str, value)))[:300] if isinstance(value, Mapping) else repr(value)[:80]


@experiment(needs=Needs.SHARDING)
def sweep(rank: RankWorld) -> Swept:
    """Take and load state dicts with every two values of different options; two ranks with some rows alone."""
    groups, axes = Groups(), {"layout": LAYOUTS[rank.mesh.ndim], **AXES}

    def faults(options: Options, directory: Path, trial: DeviceMesh) -> dict[str, str]:
        return Case(options, trial, directory, groups.world(trial)).faults()

    known: dict[str, Any] = {"rules": RULES, "suspects": SUSPECTS, "refusals": REFUSALS, "more": _kinds}
    return sweep_rows(rank, rank.mesh, faults, options=axes, label="state dicts", **known)


def _kinds(row: Options) -> Iterator[str]:
    """Yield the kinds of a row of which there must be one where not all rows are tried."""
    if row["functions"] != "model alone":
        yield f"{row['optimizer']}, flat: {row['flatten_optimizer_state_dict']}"
        yield f"unused {row['unused']}, full: {row['full_state_dict']}"
        yield f"frozen: {row['frozen']}, flat: {row['flatten_optimizer_state_dict']}"
        yield f"submodules: {row['submodules']}, {row['functions']}"
    yield f"frozen: {row['frozen']}, ignored: {row['ignore_frozen_params']}"
    yield f"submodules: {row['submodules']}, with prefixes: {row['keep_submodule_prefixes']}"
    yield f"tied: {row['tied']}, full: {row['full_state_dict']}"
