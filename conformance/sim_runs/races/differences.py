"""Differences between a run and the eager run of the same command: bits that the host read, and memory at the end."""

from conformance.sim_runs.races.findings import Difference
from conformance.sim_runs.races.program import Program
from conformance.sim_runs.races.runs import Run


def differences(eager: Run, run: Run) -> list[Difference]:
    """Return the first difference of each process; if there is none, that of the exit status."""
    found = [_difference(program, run, name) for name, program in eager.programs.items()]
    if not any(found) and run.status != eager.status:
        found.append(Difference("command", "ended", f"status {run.status}, eagerly {eager.status}", None, 1))
    return [difference for difference in found if difference]


def _difference(program: Program, run: Run, name: str) -> Difference | None:
    other = run.programs.get(name)
    if other is None:
        how = "was killed" if name in run.died else "did not use the device"
        return Difference(name, "ended", f"the process {how}", None, 1)
    return _reads(program, other) or _operators(program, other) or _blocks(program, other) or _ended(program, other)


def _reads(program: Program, other: Program) -> Difference | None:
    expected, present = ({read.number: read.digest for read in each.recorded.reads} for each in (program, other))
    common = [n for n in sorted(expected.keys() & present.keys()) if _has_same_operator(program, other, n)]
    changed = [number for number in common if expected[number] != present[number]]
    if not changed:
        return None
    first = program.operator(changed[0])
    same_line = [n for n in common if n <= first.number and _line(program, n) == _line(program, first.number)]
    what = f"{first.operator}, number {len(same_line)} of its line"
    return Difference(program.name, "read", what, first.program, len(changed))


def _line(program: Program, number: int) -> object:
    issued = program.operator(number)
    return issued.operator, issued.program


def _has_same_operator(program: Program, other: Program, number: int) -> bool:
    return number in other.positions and program.operator(number).operator == other.operator(number).operator


def _operators(program: Program, other: Program) -> Difference | None:
    """Compare the sequences of operators: a program may go another way after it has read other bits."""
    for number in program.positions:
        if not _has_same_operator(program, other, number):
            expected = program.operator(number)
            present = other.operator(number).operator if number in other.positions else "none"
            what = f"operator {number} is {present}, eagerly {expected.operator}"
            return Difference(program.name, "operators", what, expected.program, 1)
    return None


def _blocks(program: Program, other: Program) -> Difference | None:
    expected, present = ({block.number: block for block in each.recorded.blocks} for each in (program, other))
    common = sorted(expected.keys() & present.keys())
    changed = [number for number in common if expected[number].digest != present[number].digest]
    if not changed:
        return None
    allocations = [entry for entry in program.trace if entry.kind == "alloc"]
    block = expected[changed[0]]
    what = f"memory in use at the end, {block.size_bytes} bytes"
    place = program.site(allocations[block.number - 1]).program
    return Difference(program.name, "memory", what, place, len(changed))


def _ended(program: Program, other: Program) -> Difference | None:
    failure = other.recorded.failure
    return Difference(program.name, "ended", failure, None, 1) if failure != program.recorded.failure else None
