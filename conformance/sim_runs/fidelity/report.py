"""Comparison of measured facts with the rules, and the page that shows the table."""

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

from tabulate import tabulate

from conformance.project import PROJECT
from conformance.sim_runs.fidelity.measuring import Measured, read
from conformance.sim_runs.fidelity.rules import SOURCES, Fact, Rule, areas, rules
from conformance.torch_release import release

DOCUMENT = PROJECT / "docs" / "sim" / "fidelity.md"
GPU_FACTS = PROJECT / "docs" / "gpu" / "fidelity.json"
"""Facts of a GPU, as `conformance sim fidelity --device cuda --write` leaves them."""
COMMAND = "python -m conformance sim fidelity --write"
_INTRODUCTION = f"""# What the rules of the simulated device rest on

Written by `{COMMAND}`. Each rule of the model of
[the simulated accelerator](../simulated_accelerator.md) has a sentence, the files of `conformance/sim/csrc` that follow
it, and its sources. A probe measures it on the simulated device, in the suite's tests, and on a GPU:
`python -m conformance sim fidelity --device cuda`, which `ci/device_trial.sh` runs. A rule with a **deviation** holds
on a GPU and not on the simulated device."""


def differences(rule: Rule, name: str, measured: Measured) -> list[str]:
    """Return the expected facts of a rule that a device did not show, one line each, and a failure of its probe."""
    if name in measured.failures:
        return [f"the probe failed: {measured.failures[name]}"]
    facts = measured.facts.get(name, {})
    return [
        f"{fact}: measured {_spelled(facts.get(fact))}, expected {_spelled(expected)}"
        for fact, expected in rule.expected.items()
        if facts.get(fact) != expected
    ]


def is_judged(rule: Rule, name: str, measured: Measured) -> bool:
    """Return whether a device has to show a rule's facts: the simulated one need not where it deviates.

    A probe without facts lacks the machine for them.
    """
    if not rule.expected or measured.facts.get(name) == {}:
        return False
    follows = not rule.deviation and (not rule.since or release(measured.torch) >= release(rule.since))
    return measured.device != "sim" or follows


def disagreements(measured: Measured) -> dict[str, list[str]]:
    """Return the differences of all rules that a device has to follow, by id; empty if it follows the model."""
    found = {
        name: differences(rule, name, measured) for name, rule in rules().items() if is_judged(rule, name, measured)
    }
    return {name: lines for name, lines in found.items() if lines}


def comparison(measured: Measured) -> str:
    """Return a table of all facts: the expected value, the measured one, and whether both agree."""
    rows = [row for name, rule in rules().items() if not rule.unmeasured for row in _compared(name, rule, measured)]
    wrong = disagreements(measured)
    judged = sum(is_judged(rule, name, measured) for name, rule in rules().items())
    table = tabulate(rows, headers=["rule", "fact", "expected", "measured", ""], disable_numparse=True)
    return (
        f"{table}\n\n{measured.device}, torch {measured.torch}: {judged - len(wrong)} of {judged} rules agree"
        + "".join(f"\n{name}: {line}" for name, lines in wrong.items() for line in lines)
    )


def _compared(name: str, rule: Rule, measured: Measured) -> Iterator[list[str]]:
    if name in measured.failures:
        yield [name, measured.failures[name], "", "", "failed" if is_judged(rule, name, measured) else "deviation"]
        return
    facts = measured.facts[name]
    for fact in [*rule.expected, *(fact for fact in facts if fact not in rule.expected)]:
        expected, value = rule.expected.get(fact), facts.get(fact)
        yield [
            name,
            fact,
            _spelled(expected),
            _spelled(value),
            _verdict(expected, value, is_judged(rule, name, measured)),
        ]


def _verdict(expected: Fact | None, value: Fact | None, is_judged: bool) -> str:
    if expected is None:
        return "not judged"
    if expected == value:
        return "agrees"
    return "DIFFERS" if is_judged else "deviation"


def _spelled(fact: Fact | None) -> str:
    return {None: "-", True: "yes", False: "no"}[fact] if fact is None or isinstance(fact, bool) else str(fact)


def as_markdown() -> str:
    """Return the content of docs/sim/fidelity.md, with the facts of a GPU if there are any."""
    gpu = read(GPU_FACTS) if GPU_FACTS.exists() else None
    sections = [_INTRODUCTION, _confirmation(gpu)]
    for area, its_rules in areas().items():
        headers = ["id", "rule", "files", "rests on", "GPU"]
        rows = [_row(name, rule, gpu) for name, rule in its_rules.items()]
        sections += [f"## {area[0].upper()}{area[1:]}", tabulate(rows, headers=headers, tablefmt="github")]
    sections += ["## The device in C++", _source_table()]
    return "\n\n".join(sections) + "\n"


def _confirmation(gpu: Measured | None) -> str:
    if gpu is None:
        return "No GPU has run the probes yet: every rule is unverified on a GPU."
    wrong = disagreements(gpu)
    return f"Measured on {gpu.device}, torch {gpu.torch}, CUDA {gpu.cuda}: {len(wrong)} rules disagree."


def _row(name: str, rule: Rule, gpu: Measured | None) -> list[str]:
    deviation = f" **Deviation**: {rule.deviation}." if rule.deviation else ""
    sources = ", ".join(f"[{_title(source)}]({source})" for source in rule.sources) or "unverified"
    files = ", ".join(f"`{file}`" for file in rule.files) or "-"
    return [name, f"{rule.rule}{deviation}", files, sources, _on_gpu(name, rule, gpu)]


def _title(source: str) -> str:
    """Return a short name of a source: its file, with the number of an issue or a pull request."""
    *_, parent, last = source.rstrip("/").split("/")
    return f"{parent} {last}" if last.isdecimal() else last.partition("#")[0].removesuffix(".html")


def _on_gpu(name: str, rule: Rule, gpu: Measured | None) -> str:
    if rule.unmeasured:
        return f"no probe: {rule.unmeasured}"
    if gpu is None:
        return "unverified on a GPU"
    if not rule.expected:
        return "; ".join(f"{fact}: {_spelled(value)}" for fact, value in gpu.facts.get(name, {}).items())
    return "; ".join(differences(rule, name, gpu)) or "confirmed"


def _source_table() -> str:
    """Return a table of the C++ files: lines with those of the header, and the first sentence of the comment there."""
    stems = sorted({file.stem for file in SOURCES.iterdir()})
    files = {
        stem: [file for file in (SOURCES / f"{stem}.h", SOURCES / f"{stem}.cpp") if file.exists()] for stem in stems
    }
    lines = {stem: sum(len(file.read_text().splitlines()) for file in files[stem]) for stem in stems}
    rows = [[f"`{stem}`", lines[stem], next(filter(None, map(_purpose, files[stem])), "-")] for stem in stems]
    return tabulate([*rows, ["all", sum(lines.values()), ""]], headers=["file", "lines", "for"], tablefmt="github")


def _purpose(file: Path) -> str:
    """Return the first sentence of the comment at the head of a file, empty if it has none."""
    head = itertools.takewhile(lambda line: line.startswith("//"), file.read_text().splitlines())
    comment = " ".join(line.removeprefix("//").strip() for line in head)
    return comment.partition(". ")[0].rstrip(".")


def screen_lines(measured: Measured) -> Mapping[str, str]:
    """Return few lines for the screen of a trial, by name."""
    wrong = disagreements(measured)
    judged = sum(is_judged(rule, name, measured) for name, rule in rules().items())
    lines = {"rules of the simulated device": f"{judged - len(wrong)} of {judged} hold on {measured.device}"}
    return lines | {f"rule {name}": "; ".join(differences) for name, differences in wrong.items()}
