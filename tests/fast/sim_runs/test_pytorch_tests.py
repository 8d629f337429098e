"""PyTorch's own tests: choice of files, outcomes in JUnit XML, causes, expected failures, records and summary."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from conformance.sim_runs.pytorch_tests import expectations as expected
from conformance.sim_runs.pytorch_tests import harness
from conformance.sim_runs.pytorch_tests.checkout import Checkout
from conformance.sim_runs.pytorch_tests.expectations import Expectations, Reason, Row, Skip, judge, read_expectations
from conformance.sim_runs.pytorch_tests.markdown import as_markdown
from conformance.sim_runs.pytorch_tests.outcomes import Outcome, cause, read_junit
from conformance.sim_runs.pytorch_tests.races import FileRaces
from conformance.sim_runs.pytorch_tests.record import Record, as_json, merged, read_records
from conformance.sim_runs.pytorch_tests.running import FileRun
from conformance.sim_runs.pytorch_tests.summary import as_text, is_open, judged, share
from reference_trainer.checks import UsageError

FILE = "distributed/pipelining/test_stage.py"


def checkout(directory: Path, *files: str, version: str = "2.6.0a0\n") -> Path:
    for file in files:
        path = directory / "test" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (directory / "version.txt").write_text(version)
    return directory


def test_files_of_the_areas_are_found_in_the_old_layout_and_the_new(tmp_path: Path) -> None:
    old = ("distributed/_tensor/test_dtensor.py", "distributed/_composable/fsdp/test_fully_shard_comm.py")
    other = (
        "distributed/_composable/fsdp/test_fully_shard_compile.py",
        "distributed/checkpoint/test_planner.py",
        "distributed/test_store.py",
        "test_nn.py",
    )
    new = ("distributed/tensor/test_dtensor.py", FILE)
    found = Checkout.at(checkout(tmp_path, *old, *new, *other))
    assert found.version == "2.6"
    assert {(file.area, file.name) for file in found.files()} == {
        ("FSDP2", old[1]),
        ("tensor parallelism", old[0]),
        ("tensor parallelism", new[0]),
        ("pipelining", FILE),
    }
    assert [file.name for file in found.files(["test_dtensor", "stage"])] == [old[0], new[0], FILE]
    assert Checkout.at(tmp_path / "test") == found
    with pytest.raises(UsageError, match=r"no test file .* matches test_nothing"):
        found.files(["test_nothing"])


def test_a_directory_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no checkout of PyTorch"):
        Checkout.at(tmp_path)
    with pytest.raises(UsageError, match="no version of torch: main"):
        Checkout.at(checkout(tmp_path, FILE, version="main"))


@pytest.mark.parametrize(
    ("module", "starts"),
    [("distributed._tensor.common_dtensor", True), ("common_fsdp", True), ("common_utils", False)],
)
def test_ranks_of_the_harness_are_told_from_processes_that_a_test_starts(
    module: str, starts: bool, tmp_path: Path
) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(f"from torch.testing._internal.{module} import run_tests\n")
    assert harness.starts_ranks(file) == starts


JUNIT = """<testsuites><testsuite>
<testcase classname="pipelining.test_stage.StageTest" name="test_a" time="1.5"/>
<testcase classname="pipelining.test_stage.StageTest" name="test_b" time="0.1">
<failure message="RuntimeError: Process 0 exited with error code 10">Traceback (most recent call last):
RuntimeError: Process 0 exited with error code 10 and exception:
Traceback (most recent call last):
  File "/somewhere/test_stage.py", line 7, in test_b
ValueError: got 0.25 at 0x7f00 in /some/where/file.py
</failure></testcase>
<testcase classname="pipelining.test_stage.StageTest" name="test_c" time="0"><skipped message="no cuda"/></testcase>
<testcase classname="" name="pipelining.test_stage"><error message="collection failure">
E   ImportError: cannot import name 'f'</error></testcase>
</testsuite></testsuites>"""


def test_outcomes_and_causes_are_read_from_junit(tmp_path: Path) -> None:
    (tmp_path / "junit.xml").write_text(JUNIT)
    assert read_junit(tmp_path / "junit.xml", FILE) == [
        Outcome(f"{FILE}::StageTest::test_a", "passed", "", 1.5),
        Outcome(f"{FILE}::StageTest::test_b", "failed", "ValueError: got … at 0x… in …/file.py", 0.1),
        Outcome(f"{FILE}::StageTest::test_c", "skipped", "no cuda", 0.0),
        Outcome(f"{FILE}::import", "failed", "ImportError: cannot import name 'f'", 0.0),
    ]


def test_a_failure_without_an_error_is_told_by_its_first_line() -> None:
    assert cause("\n  Fatal Python error: Aborted\nmore") == "Fatal Python error: Aborted"


def a_run(*outcomes: Outcome, world: int = 2, device: str = "sim") -> FileRun:
    return FileRun("pipelining", FILE, world, device, "lazy" if device == "sim" else "", outcomes)


def outcome(name: str, result: str, message: str = "") -> Outcome:
    return Outcome(f"{FILE}::StageTest::{name}", result, message)  # type: ignore[arg-type]


EXPECTED = Expectations(
    {"other version": Reason("older"), "CUDA kernel": Reason("none here", counts=False), "ranks": Reason("few")},
    (
        Row(tests=("*::test_old*",), reason="other version", why="private", torch=">=2.13", checkout="<2.7"),
        Row(tests=("*::test_kernel",), reason="CUDA kernel", why="triton"),
        Row(tests=("*::test_timing",), reason="other version", why="time", sometimes=True),
        Row(tests=("*::test_four",), reason="CUDA kernel", why="in four ranks", worlds=(4,)),
    ),
    (Skip("Need at least", "ranks"),),
)


@pytest.mark.parametrize(
    ("name", "result", "message", "reason", "unexpected"),
    [
        ("test_good", "passed", "", "", ""),
        ("test_old_1", "failed", "", "other version", ""),
        ("test_old_1", "passed", "", "", expected.UNEXPECTED_PASS),
        ("test_timing", "passed", "", "", ""),
        ("test_new", "failed", "", "", expected.UNEXPECTED_FAILURE),
        ("test_four", "failed", "", "", expected.UNEXPECTED_FAILURE),
        ("test_gpu", "skipped", "Need at least 4 CUDA devices", "ranks", ""),
        ("test_gpu", "skipped", "Need at least 2 CUDA devices", "", expected.UNEXPECTED_SKIP),
        ("test_gpu", "skipped", "no cuda", "", expected.UNEXPECTED_SKIP),
    ],
)
def test_outcomes_are_compared_with_the_expected_ones(
    name: str, result: str, message: str, reason: str, unexpected: str
) -> None:
    run = a_run(outcome(name, result, message))
    (verdict,) = judge(run, torch="2.13.0+cpu", checkout="2.6", expectations=EXPECTED)
    assert (verdict.reason, verdict.unexpected) == (reason, unexpected)


def test_expected_failures_are_those_of_a_version_and_the_cpu_surprises_nobody() -> None:
    run = a_run(outcome("test_old", "failed"))
    (verdict,) = judge(run, torch="2.12.1", checkout="2.6", expectations=EXPECTED)
    assert verdict.unexpected == expected.UNEXPECTED_FAILURE
    before = a_run(outcome("test_new", "failed"), device="cpu")
    assert judge(before, torch="2.13.0", checkout="2.6", expectations=EXPECTED)[0].unexpected == ""


def test_the_list_of_expected_failures_is_valid_and_a_reason_has_to_be_listed(tmp_path: Path) -> None:
    assert read_expectations().reasons
    file = tmp_path / "expected.yaml"
    file.write_text("reasons: {}\nfailures: []\nskips:\n  - {message: x, reason: none}\n")
    with pytest.raises(UsageError, match=r"expected\.yaml:4: no reason is called 'none'"):
        read_expectations(file)


RUNS = (
    a_run(outcome("test_good", "passed"), outcome("test_old", "failed", "TypeError: f()")),
    a_run(
        outcome("test_kernel", "failed", "ImportError: triton"), outcome("test_new", "failed", "KeyError: 1"), world=4
    ),
    a_run(outcome("test_good", "skipped", "no cuda"), device="cpu"),
)
RECORD = Record("2.13.0", "2.6", RUNS)


def test_the_share_leaves_out_kernels_of_cuda() -> None:
    on_sim = [one for one in judged(RECORD, EXPECTED) if one.run.device == "sim"]
    counted = share(on_sim, EXPECTED)
    assert (counted.passed, counted.tests, counted.other_version) == (1, 3, 1)
    assert "1 of 3 tests pass (33%)" in str(counted)
    assert "50% without the 1" in str(counted)


def test_text_and_page_have_counts_causes_and_reasons() -> None:
    text, page = as_text(RECORD, EXPECTED), as_markdown([RECORD], EXPECTED)
    assert f"unexpected failure: {FILE}::StageTest::test_new (sim:lazy, 4 ranks)" in text
    assert "TypeError: f()" in text
    (row,) = [line for line in page.splitlines() if line.startswith("| pipelining")]
    assert [cell.strip() for cell in row.split("|")[1:-1]] == [
        "pipelining",
        "test_stage.py",
        "0 / 0 / 1",
        "1 / 1 / 0",
        "0 / 2 / 0",
    ]
    assert "private" in page
    assert "KeyError: 1" in page


def test_a_record_replaces_earlier_runs_of_the_same_file_and_setting(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    assert read_records(file) == []
    file.write_bytes(as_json([RECORD]))
    again = a_run(outcome("test_good", "failed"))
    (record,) = merged(read_records(file), Record("2.13.0", "2.6", (again,)))
    assert set(record.runs) == {again, *RUNS[1:]}
    assert len(merged([RECORD], Record("2.14.0", "2.6", (again,)))) == 2


PAIR = "aten::add_ on stream 0 at test_stage.py:7; aten::mul on stream 1 at test_stage.py:9"
SEARCHES = (
    FileRaces("pipelining", FILE, 2, operators=12, schedules=("eager", "lazy"), orders=2, unordered=(PAIR,)),
    FileRaces("pipelining", FILE, 4, operators=9, schedules=("eager", "lazy"), orders=1, other_bits=("lazy",)),
)


def test_races_are_told_with_their_lines() -> None:
    record = Record("2.13.0", "2.6", races=SEARCHES)
    text, page = as_text(record, EXPECTED), as_markdown([record], EXPECTED)
    assert f"test_stage.py: {PAIR}" in text
    assert f"- test_stage.py: {PAIR}" in page
    assert "other under lazy" in page


READ = "copy_device_to_pageable, number 1 of its line at test_stage.py:7"


def test_the_first_differences_of_two_eager_runs_are_on_the_page() -> None:
    search = FileRaces("pipelining", FILE, 2, operators=1, eager_differences=(READ,))
    page = as_markdown([Record("2.13.0", "2.6", races=(search,))], EXPECTED)
    assert f"- test_stage.py, 2 ranks: {READ}" in page


@pytest.mark.parametrize(
    ("failure", "bits", "is_unexpected"),
    [
        (Outcome(f"{FILE}::import", "failed", "KeyError: 1"), "failed at import: KeyError: 1", True),
        (Outcome(f"{FILE}::time limit", "failed", "not finished within 5 s"), "killed at the time limit: not", True),
        (Outcome(f"{FILE}::process", "failed", "exit status 3: none"), "failed before its first test: exit", False),
        (None, "no test used the device", False),
    ],
)
def test_a_search_says_why_nothing_ran_and_is_open_unless_that_is_expected(
    failure: Outcome | None, bits: str, is_unexpected: bool
) -> None:
    expectations = replace(EXPECTED, failures=(Row(tests=("*::process",), reason="other version", why="old"),))
    search = FileRaces("pipelining", FILE, 2, not_run=failure)
    record = Record("2.13.0", "2.6", races=(search,))
    assert search.bits.startswith(bits)
    assert search.bits in as_text(record, expectations)
    assert is_open(search, record, expectations) == is_unexpected


@pytest.mark.parametrize(
    ("search", "has_race", "bits"),
    [
        (SEARCHES[0], True, "equal"),
        (SEARCHES[1], True, "other under lazy"),
        (
            FileRaces("a", "b", 2, operators=1, other_bits=("lazy",), eager_differences=(READ,)),
            False,
            "two eager runs differ",
        ),
        (FileRaces("a", "b", 2, operators=1, held_by_waits=3), False, "equal"),
        (FileRaces("a", "b", 2, other_bits=("lazy",), unfinished=("lazy",)), False, "not finished under lazy"),
    ],
)
def test_bits_are_a_race_in_deterministic_tests_alone(search: FileRaces, has_race: bool, bits: str) -> None:
    assert (search.has_race, search.bits) == (has_race, bits)


def test_a_search_replaces_an_earlier_one_and_keeps_runs() -> None:
    before = Record("2.13.0", "2.6", RUNS, SEARCHES)
    again = FileRaces("pipelining", FILE, 4, operators=9)
    (record,) = merged([before], Record("2.13.0", "2.6", races=(again,)))
    assert record.races == (SEARCHES[0], again)
    assert set(record.runs) == set(RUNS)
