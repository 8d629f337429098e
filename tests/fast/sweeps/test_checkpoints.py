"""Sweeps of checkpoints: no parameter is missing without a reason, and their states tell times and places apart."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import hf_storage, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save

from conformance.sweeps import checkpoint_formats, checkpoint_layouts, checkpoint_options, checkpoint_storage
from conformance.sweeps.checkpoints import fault, numbers, spoiled

GIVEN_BY_THE_CASE = {
    "path",
    "state_dict",
    "checkpoint_id",
    "storage_writer",
    "storage_reader",
    "planner",
    "process_group",
}
"""Parameters for which a case has its own objects."""
OPTIONS_OF = {
    "overwrite": "path",
    "async_stager": "stager",
    "no_dist": "loaded by",
    "use_pinned_memory": "stager",
    "use_shared_memory": "stager",
    "use_async_staging": "stager",
    "use_non_blocking_copy": "stager",
    "fqn_to_index_mapping": "format",
    "_extension_registry": "_extensions",
}
"""Options of the sweep that try a parameter under another name."""
LEFT_OUT = {
    "serialization_format": "HuggingFaceStorageWriter sets it; no reader of the default format reads another one",
    "async_checkpointer_type": "a process of its own imports torch again, which takes longer than all other cases",
}
"""Parameters that no case tries, with the reason."""


@pytest.mark.parametrize(
    ("call", "axes"),
    [
        (FileSystemWriter, checkpoint_storage.AXES),
        (FileSystemReader, checkpoint_storage.AXES),
        (DefaultSavePlanner, checkpoint_storage.AXES),
        (DefaultLoadPlanner, checkpoint_storage.AXES),
        (StagingOptions, checkpoint_storage.AXES),
        (save, checkpoint_storage.AXES),
        (async_save, checkpoint_storage.AXES),
        (load, checkpoint_storage.AXES),
        (state_dict_saver.save_state_dict, checkpoint_storage.AXES),
        (state_dict_loader.load_state_dict, checkpoint_storage.AXES),
        (hf_storage.HuggingFaceStorageWriter, checkpoint_formats.AXES),
        (hf_storage.HuggingFaceStorageReader, checkpoint_formats.AXES),
    ],
)
def test_every_parameter_is_an_option_or_left_out_for_a_reason(
    call: Callable[..., Any], axes: Mapping[str, Any]
) -> None:
    named = set(inspect.signature(call).parameters) - GIVEN_BY_THE_CASE - LEFT_OUT.keys()
    assert {OPTIONS_OF.get(name, name) for name in named} <= axes.keys()


def test_every_field_of_state_dict_options_is_an_option() -> None:
    assert {field.name for field in fields(StateDictOptions)} <= checkpoint_options.AXES.keys()
    for field in fields(StateDictOptions):
        assert checkpoint_options.AXES[field.name][0] == field.default


@pytest.mark.parametrize(
    "values", [checkpoint_layouts.full_state, checkpoint_storage.full_values, checkpoint_formats.full_tensors]
)
def test_each_time_has_other_values(values: Callable[[int], Mapping[str, Any]]) -> None:
    for time in (1, 2):
        before, after = values(time - 1), values(time)
        constant = {"empty", "nothing"}
        assert all(fault(before[name], after[name]) for name in before.keys() - constant)


def test_what_a_state_is_loaded_into_differs_from_it() -> None:
    state = {"tensor": numbers((3,), 0), "nested": [{"rate": 0.5}, "name"]}
    assert fault(spoiled(state)["tensor"], state["tensor"])
    assert spoiled(state)["nested"] == [{"rate": -1.0}, "other"]


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        (torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.zeros(1, 2), "(1, 2)"),
        (torch.ones(2), "[1.0, 1.0]"),
        (torch.zeros(2, device="meta"), "on meta"),
        (0.0, "expected a tensor"),
    ],
)
def test_a_difference_in_kind_or_value_is_a_fault(measured: Any, text: str) -> None:
    assert text in fault(measured, torch.zeros(2))
    assert not fault(torch.zeros(2), torch.zeros(2))
