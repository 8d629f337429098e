"""Loading of a subject's module: variables that differ between ranks, threads, process groups."""

import os
import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from conformance.subjects.loading import Loading, noted

HERE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def loading_of(load: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> Loading:
    for name, value in HERE.items():
        monkeypatch.setenv(name, value)
    with noted() as loading:
        load()
    return loading


@pytest.mark.parametrize(
    "load",
    [
        lambda: os.environ["HOME"],
        lambda: os.environ.get("MASTER_ADDR"),
        lambda: {name: value for name, value in os.environ.items() if name.startswith("NETWORKX")},
        lambda: os.environ.copy(),
    ],
    ids=["another", "another-get", "its-own-among-all", "copy"],
)
def test_the_same_on_all_ranks(load: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert loading_of(load, monkeypatch).is_same_on_all_ranks


@pytest.mark.parametrize(
    "load",
    [
        lambda: os.environ["RANK"],
        lambda: os.environ.get("LOCAL_RANK", 0),
        lambda: os.getenv("WORLD_SIZE"),
        lambda: "LOCAL_WORLD_SIZE" in os.environ,
    ],
    ids=["item", "get", "getenv", "in"],
)
def test_a_variable_of_ranks(load: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    loading = loading_of(load, monkeypatch)
    assert len(loading.read) == 1
    assert not loading.is_same_on_all_ranks


def test_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    loading = loading_of(thread.start, monkeypatch)
    ended.set()
    thread.join()
    assert loading.left_threads
    assert not loading.is_same_on_all_ranks


def test_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        dist.init_process_group("fake", rank=0, world_size=1, store=HashStore())

    try:
        loading = loading_of(load, monkeypatch)
    finally:
        dist.destroy_process_group()
    assert loading.left_groups
    assert not loading.is_same_on_all_ranks
