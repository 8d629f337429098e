"""Rules beside those of `make check`: sizes, order of imports, torch and private names, docstrings and names."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import PurePath

import pytest

from conformance.project import LAYERS, PROJECT, TORCH_FREE
from tests.support.source_code import (
    cycle,
    docstrings,
    files,
    identifiers,
    imported_modules,
    imports,
    modules,
    private_names,
    tree,
    words,
)

PACKAGES = files("conformance", "reference_trainer")
PROGRAMS = files("benchmarks", "conformance", "reference_trainer", "tests")

MAX_LINES = 600
MAX_SHARE = 0.20
"""Largest share of a package in the lines of `conformance` and `reference_trainer`."""

MODULES_BELOW, MAIN = "conformance/*.py", "conformance/__main__.py"
ORDER = (*LAYERS, (MAIN,))
"""Layers of imports, bottom up."""

WITH_TORCH = tuple(f"conformance/run/ranks/{name}.py" for name in ("process", "process_groups", "server"))
TORCH = re.compile(r"(torch|safetensors\.torch)(\..*)?")
PYTEST_ALLOWED_IN = (
    "conformance/pytest_plugin/",
    "conformance/cli/judge.py",
    "conformance/cli/spmd.py",
    "conformance/sim_runs/pytorch_tests/process.py",
)

PRIVATE_NAMES_ALLOWED_IN = {
    "conformance/instruments/compilation.py": "breaks of graphs have no public counter",
    "conformance/instruments/dispatch_tap.py": "the dispatch mode has no public name",
    "conformance/instruments/fake_tensors.py": "fake tensors have no public name; an error names them if they are gone",
    "conformance/instruments/collectives.py": "functional collectives name their group",
    "conformance/instruments/flattened_mesh.py": "no public name flattens a mesh; an error names it if it is gone",
    "conformance/instruments/held_storages.py": "nothing public tells whether a storage is alive without keeping it so",
    "conformance/instruments/allocator_snapshot.py": "documented under these names; without them there is no snapshot",
    "conformance/instruments/ring_attention.py": "its options have no public name; an error names them if gone",
    "conformance/instruments/delays.py": "nothing public keeps a stream busy; an error names it if it is gone",
    "conformance/sweeps/checkpoint_extension.py": "an option takes extensions, whose classes have no public name",
    "conformance/experiments/fsdp_extension.py": "documented extensions of FSDP2 have no public names",
    "conformance/experiments/context.py": "the fake process group is private; an error names it if it is gone",
    "conformance/sim/device.py": "a device module has no public way in; an error names it if it is gone",
    "conformance/sim_runs/fidelity/probes/operators.py": "FSDP2's norms of lists have no public name; a probe fails",
    "conformance/sim_runs/operators/database.py": "torch's operator database; an error names it if it is gone",
    "conformance/sim_runs/pytorch_tests/": "PyTorch's own tests ask for the harness; a test that lacks it fails",
    "conformance/run/ranks/flight_recorder.py": "nothing public dumps the recorder; without the names there is no dump",
    "conformance/run/ranks/process.py": "no public name tells whether a fork can use CUDA; CPU builds have it too",
    "conformance/run/ranks/process_groups.py": "all groups of a process; without them these only end later",
    "conformance/run/ranks/preload.py": "names a module to load, and does without it where it is missing",
    "reference_trainer/__main__.py": "silences a logger, which is harmless where it does not exist",
    "conformance/defects/": "a fault is put where the real one was",
}
"""Files and directories that may use private names below `torch`, with the reason."""

PRONOUNS = re.compile(
    r"(And|As|Beside|But|For|It|Of|That|The same|They|Those|Whether|Which|With|Others|Nobody|Somebody|Something|"
    r"(This|These|One) (is|are|was|were|has|have|does|must|may|can))\b"
)
"""First words of a docstring without a subject that stands alone."""
NOUN_CLAUSES = re.compile(r"\b(what(?! to\b)|whatever|whoever|whichever|that which)\b", re.IGNORECASE)
"""Begin of a clause in place of a noun, such as `what is held`; the remedy is the noun: held memory."""
OBSCURE = re.compile(
    r"\b(alike|anew|as far as|but for|in force|meanwhile|mend(s|ed)?|(no|some|any|every)body|of (its|their|one's) own|"
    r"thereafter|(is|are|was|were) to [a-z]+|(?<=[a-z] )(?<!and )(?<!or )(?<!but )otherwise)\b"
)
"""Words for which there are plainer ones: equally, again, if, except, valid, fix, no user, separate, later, must."""
API_TABLES = ("OPTIONS", "_METHODS", "_NEWER_METHODS")
"""Variables whose keys are names of metrics, and therefore of the API."""
API_KEY = re.compile(r"[A-Za-z_][\w.]*(\(.*\).*)?")
REPLACED_WORDS = {
    *("part", "parts", "piece", "pieces", "stretch", "whole", "divided"),  # shard, full, sharded
    *("drawn", "draws", "figure", "figures", "moved"),  # sampled, samples, metric, drifted
    *("texts", "drawings", "page", "bench", "lifetimes"),  # rendering, charts, HTML report, judge, version traits
    *("bury", "bell", "bells", "illustrate", "heir", "heirs"),  # kill and reap, channel, notify, diagnostics
    *("enough", "spoil", "spoiler", "late", "idle", "beside"),  # stop, make non-finite, delayed
}
"""Words for which the field has other terms."""
REPLACED_PHRASES = ("shown by", "by hand", "rank place", "rank interface", "rank device")
FIELD_TERMS = {
    *("idle_s", "IDLE_LIMIT_S", "IDLE_POLL_S"),
    *("ga_not_divided", "fp16_divided_before_alone", "rowwise_bias_grad_divided", "dtensor_draws_alike"),
}
"""Identifiers in which such a word is the field's own: idle pools, and defects about division and random draws."""


def require(rule: Callable[[str], Iterable[str]], checked: Iterable[str]) -> None:
    """Require that a rule, which returns the violations of a file, finds none in the files."""
    violations = [f"{file}: {violation}" for file in checked for violation in rule(file)]
    assert not violations, "\n".join(violations)


# Sizes


def line_count(file: str) -> int:
    return len((PROJECT / file).read_text().splitlines())


def test_no_file_is_too_long_and_no_package_too_large() -> None:
    too_long = [file for file in PROGRAMS if line_count(file) > MAX_LINES]
    assert not too_long, f"more than {MAX_LINES} lines"
    lines: Counter[str] = Counter()
    for file in PACKAGES:
        lines[package_of(file)] += line_count(file)
    ((largest, count),) = lines.most_common(1)
    share = count / lines.total()
    assert share <= MAX_SHARE, f"{largest} has {count} of {lines.total()} lines, {share:.1%}: at most {MAX_SHARE:.0%}"


# Order of imports


def package_of(file: str) -> str:
    """Return the package of a file as `ORDER` names it."""
    top, *rest = PurePath(file).parts
    if file == MAIN or top == "reference_trainer":
        return MAIN if file == MAIN else top
    return f"{top}/{rest[0]}" if len(rest) > 1 else MODULES_BELOW


def imported_packages(file: str) -> dict[str, str]:
    """Return the packages from which a file imports, with one imported module of each."""
    return {package_of(modules()[name]): name for name in sorted(imported_modules(file, typing_too=True))}


def test_every_package_has_a_layer() -> None:
    assert sorted({package_of(file) for file in PACKAGES}) == sorted(package for layer in ORDER for package in layer)


def test_imports_point_down() -> None:
    """Files import their own package and lower layers; packages of one layer do not import each other."""
    layers = {package: number for number, layer in enumerate(ORDER) for package in layer}

    def upward(file: str) -> Iterator[str]:
        own = package_of(file)
        for package, module in imported_packages(file).items():
            if layers[package] >= layers[own] and (package != own or own == MODULES_BELOW):
                yield f"must not import {module}, see conformance.project.LAYERS"

    require(upward, PACKAGES)


def test_packages_have_no_cycle() -> None:
    graph: dict[str, set[str]] = defaultdict(set)
    for file in PACKAGES:
        graph[package_of(file)] |= imported_packages(file).keys() - {package_of(file)}
    assert not cycle(graph), " -> ".join(cycle(graph))


def test_files_have_no_cycle() -> None:
    """Neither have imports for type checkers."""
    graph = {name: imported_modules(file, typing_too=True) for name, file in modules().items()}
    assert not cycle(graph), " -> ".join(cycle(graph))


# Use of torch and pytest


def test_torch_free_packages_do_not_import_torch() -> None:
    """Neither a file nor a module that it imports, at the top or inside a function, imports torch.

    Modules that are imported by a computed name are not seen: `defects.catalogue` loads faults so, for `--defect`.
    """

    def chains_to_torch(file: str) -> Iterator[str]:
        chains, waiting = {file: file}, [file]
        while waiting:
            current = waiting.pop()
            names = {imported.name for imported in imports(tree(current)) if not imported.typing_only}
            yield from (f"{chains[current]} -> {name}" for name in sorted(names) if TORCH.fullmatch(name))
            for target in {modules()[name] for name in imported_modules(current, typing_too=False)} - chains.keys():
                chains[target] = f"{chains[current]} -> {target}"
                waiting.append(target)

    torch_free = files(*TORCH_FREE)
    require(chains_to_torch, [file for file in torch_free if file not in WITH_TORCH])


def test_only_the_plugin_and_commands_with_sessions_import_pytest() -> None:
    def imports_of_pytest(file: str) -> Iterator[str]:
        if not file.startswith(PYTEST_ALLOWED_IN):
            yield from (entry.name for entry in imports(tree(file)) if entry.module.partition(".")[0] == "pytest")

    require(imports_of_pytest, PACKAGES)


# Private names


def private_torch_names(file: str) -> list[str]:
    return sorted(private_names(tree(file), "torch"))


def test_private_names_of_torch_stay_in_their_places() -> None:
    require(private_torch_names, [file for file in PACKAGES if not file.startswith(tuple(PRIVATE_NAMES_ALLOWED_IN))])


@pytest.mark.parametrize("place", PRIVATE_NAMES_ALLOWED_IN)
def test_files_that_may_use_private_names_do(place: str) -> None:
    allowed = [file for file in PACKAGES if file.startswith(place)]
    used = [name for file in allowed for name in private_torch_names(file)]
    strings = [file for file in allowed if re.search(r"""["']_\w+["']""", (PROJECT / file).read_text())]
    assert used or strings, "the exception is no longer needed"


def test_private_names_of_pytest_are_not_used() -> None:
    require(lambda file: private_names(tree(file), "pytest"), PROGRAMS)


# Docstrings and names


LANGUAGE = files("benchmarks", "conformance", "findings", "reference_trainer", "tests")


def first_sentence(docstring: str) -> str:
    """Return the first sentence of a docstring in one line, with `x` in place of code."""
    paragraph = re.sub(r"`[^`]*`", "`x`", " ".join(docstring.split("\n\n")[0].split()))
    return re.split(r"(?<=[.:!?]) (?=[A-Z`])", paragraph)[0]


def obscurity(docstring: str) -> str | None:
    """Return the words in the first sentence of a docstring that keep it from being read once and alone."""
    sentence = first_sentence(docstring)
    found = PRONOUNS.match(sentence) or NOUN_CLAUSES.search(sentence) or OBSCURE.search(sentence)
    return found[0] if found else None


def test_docstrings_are_read_once_and_alone() -> None:
    """Public or private, the first sentence of a docstring has nouns; ruff's rules `D` check its form."""

    def obscure(file: str) -> Iterator[str]:
        for line, text in docstrings(tree(file)):
            if words := obscurity(text):
                yield f"{line}: {words!r} in: {first_sentence(text)}"

    require(obscure, LANGUAGE)


def test_obscure_sentences_are_seen_and_plain_ones_left_alone() -> None:
    obscure = [
        "It is cached.",
        "What the host issues.",
        "Stream that notes what it is told.",
        "Return the entries, whatever\nthe mesh.",
        "Interface of the stream as far as FSDP uses it.",
        "Shard each norm as a group of its own.",
        "Return the ranks to be told: each is to sleep.",
        "Operators that fake tensors do otherwise.",
    ]
    plain = [
        "Return the shards.\n\nIt is what is held.",
        "Return `what` of the call.",
        "Raise UsageError with what to write instead.",
        "Return True for a rank; otherwise False.",
        "This rank's shards. They are on the CPU.",
    ]
    assert [sentence for sentence in [*obscure, *plain] if obscurity(sentence)] == obscure


def test_names_are_no_prepositions() -> None:
    def prepositions(file: str) -> Iterator[str]:
        names = ((line, name.lstrip("_")) for line, name in identifiers(tree(file)))
        yield from (f"{line}: {name}" for line, name in names if name.startswith("of_"))

    require(prepositions, LANGUAGE)


def keys(module: ast.Module, tables: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Yield line and text of the keys of dictionaries that a module assigns to variables with these names."""
    for node in module.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=ast.Dict(keys=nodes))
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.Dict(keys=nodes))
            ) if name in tables:
                yield from ((key.lineno, str(key.value)) for key in nodes if isinstance(key, ast.Constant))


def test_keys_of_metrics_are_names_of_the_api() -> None:
    def other_keys(file: str) -> Iterator[str]:
        yield from (f"{line}: {key}" for line, key in keys(tree(file), API_TABLES) if not API_KEY.fullmatch(key))

    require(other_keys, files("conformance"))


@cache
def is_replaced(identifier: str) -> bool:
    """Return whether an identifier contains a word or phrase for which the field has another term."""
    if identifier in FIELD_TERMS:
        return False
    phrase = f" {' '.join(words(identifier))} "
    return any(f" {replaced} " in phrase for replaced in (*REPLACED_WORDS, *REPLACED_PHRASES))


def test_names_are_the_terms_of_the_field() -> None:
    def replaced_names(file: str) -> Iterator[str]:
        yield from (f"{line}: {name}" for line, name in identifiers(tree(file)) if is_replaced(name))
        yield from (f"path: {name}" for name in PurePath(file).with_suffix("").parts if is_replaced(name))

    require(replaced_names, PACKAGES)


def test_replaced_words_are_seen_and_terms_of_the_field_left_alone() -> None:
    replaced = ["run_part", "BuryRanks", "PAGE", "defects_shown_by", "idle", "_late"]
    terms = ["idle_s", "placements", "Partial", "partial_sum", "full_tensor", "string", "compare"]
    assert [name for name in [*replaced, *terms] if is_replaced(name)] == replaced
