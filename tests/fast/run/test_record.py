"""Records: full tensors are assembled from the shards of all ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_origin

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from conformance.instruments.facts import RankFacts
from conformance.outcomes import ConformanceFailure, Failure
from conformance.plan.cells import Cell
from conformance.run.record import Header, Record, RecordFile, read_record, write_record
from conformance.run.shards import tensor_file


def record_of_two_ranks(
    directory: Path, shards: list[dict[str, Tensor]], facts_of_ranks: Sequence[dict[str, Any]] = ({}, {})
) -> Record:
    parameters = {"w": {"group": "", "shape": [3, 2], "shard_dims": {"dp_shard": 0}}}
    kinds = {field.name: get_origin(field.type) for field in msgspec.structs.fields(RankFacts)}
    empty: dict[str, Any] = {name: kind() for name, kind in kinds.items() if kind in (list, dict)}
    blocks = {"graphs": 0, "compiled": 0, "eager": 0}
    single = {
        "blocks": blocks,
        "checkpoint": None,
        "checkpoint_format": None,
        "calibration_s": 0.001,
        "communication": None,
        "expandable_segments": None,
    }
    facts = {**empty, **single, "parameters": parameters}
    for rank, tensors in enumerate(shards):
        save_file(tensors, directory / tensor_file(rank))
    header = Header(cell=Cell(), session="s", torch="2", substrate="gloo", defect=None)
    ranks = msgspec.Raw(msgspec.json.encode([{"rank": rank, **facts, **facts_of_ranks[rank]} for rank in (0, 1)]))
    return Record(directory, RecordFile(header=header, ranks=ranks))


def test_select_assembles_full_tensors(tmp_path: Path) -> None:
    layouts = [torch.tensor([[0, 1], [2, 3]]), torch.tensor([[4, 5]])]
    shards = [
        {"layout/w": layout, "final/parameter/w": layout + 0.5, "final/buffer/b": torch.ones(1)} for layout in layouts
    ]
    record = record_of_two_ranks(tmp_path, shards)
    assert record.select("final/parameter/")["w"].tolist() == [[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]]
    assert record.select("final/buffer/")["b"].tolist() == [1.0]
    with pytest.raises(KeyError, match="holds no tensor below step0/"):
        record.select("step0/")


@pytest.mark.parametrize(
    ("shape", "layouts", "is_partitioned"),
    [
        ([3], [[0, 1], [2]], True),
        ([3], [[0, 1, 2], [0, 1, 2]], True),
        ([3], [[0, 1], [1, 2]], False),
        ([3], [[0, 1], []], False),
        ([3], [], False),
        ([0], [[], []], True),
        ([0], [], False),
    ],
)
def test_ranks_partition_a_parameter(
    tmp_path: Path, shape: list[int], layouts: list[list[int]], is_partitioned: bool
) -> None:
    parameters = {"parameters": {"w": {"group": "", "shape": shape, "shard_dims": {"dp_shard": 0}}}}
    shards = [{"layout/w": torch.tensor(layout, dtype=torch.int64)} for layout in layouts] or [{}, {}]
    record = record_of_two_ranks(tmp_path, shards, (parameters, parameters))
    assert record.is_partitioned("w") == is_partitioned


def test_select_fills_holes_with_nan_and_refuses_shards_of_another_shape(tmp_path: Path) -> None:
    shard = {"layout/w": torch.tensor([[0, 1], [2, 3]]), "final/parameter/w": torch.ones(2, 2)}
    record = record_of_two_ranks(tmp_path, [shard, shard])
    assert record.select("final/parameter/")["w"].isnan().tolist() == [[False] * 2, [False] * 2, [True] * 2]
    wrong = {**shard, "final/parameter/w": torch.ones(3, 2)}
    with pytest.raises(
        ConformanceFailure, match=r"rank 1 holds a tensor of shape \(3, 2\), its shard has shape \(2, 2\)"
    ):
        record_of_two_ranks(tmp_path, [shard, wrong]).select("final/parameter/")
    del wrong["final/parameter/w"]
    with pytest.raises(ConformanceFailure, match="rank 1 holds nothing"):
        record_of_two_ranks(tmp_path, [shard, wrong]).select("final/parameter/")


@pytest.mark.parametrize(
    ("layouts", "is_refused"), [(("all", "all"), True), (("first half", "second half"), False), ((), True)]
)
def test_select_refuses_copies_that_differ(tmp_path: Path, layouts: tuple[str, ...], is_refused: bool) -> None:
    """Only one rank's copy is assembled; elements of different shards are no copies of each other."""
    key = "final/parameter/w"
    facts = [
        {"fingerprints": {key: f"bits of rank {rank}"}, "layouts": {"w": layouts[rank]} if layouts else {}}
        for rank in (0, 1)
    ]
    shard = {"layout/w": torch.tensor([[0, 1]]), key: torch.ones(1, 2), "initial/parameter/w": torch.ones(1, 2)}
    record = record_of_two_ranks(tmp_path, [shard, shard], facts)
    assert "w" in record.select("initial/parameter/")
    assert record.unequal_copies == ([(key, 1)] if is_refused else [])
    if is_refused:
        with pytest.raises(ConformanceFailure, match="w: rank 1 holds other bits"):
            record.select("final/parameter/")


@pytest.mark.parametrize(
    "failure", [None, Failure(kind="timeout", first_rank=1, reason="rank 1 hung", details="stacks")]
)
def test_record_round_trip(tmp_path: Path, failure: Failure | None) -> None:
    cell = Cell(mesh="dp2-tp2", clip=0.0)
    header = Header(cell=cell, session="s", torch="2.13.0", substrate="gloo", defect=None)
    content = RecordFile(header=header, train_s=0.5, ranks=msgspec.Raw(b'[{"rank":0}]'), failure=failure)
    assert read_record(tmp_path) is None
    write_record(tmp_path, content)
    read = read_record(tmp_path)
    assert read is not None
    assert (read.header, read.train_s, read.failure) == (header, 0.5, failure)
    assert msgspec.json.decode(read.ranks) == [{"rank": 0}]
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]
    assert Record(tmp_path, read).cell == cell
