"""Tree of a model's modules with the state of each, as texts and report.html show it beside a first wrong place.

Neighbours in the same state are one branch, so that a model of 80 layers has about as many rows as one of two.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from conformance.report.location import Location, Mark

_ROOT = "model"
_MAX_NAMES = 3
"""Number of neighbours that are all named."""


class Branch(msgspec.Struct, frozen=True, kw_only=True):
    """Module with the modules below it, or neighbours that are in the same state."""

    names: tuple[str, ...]
    """Path of each module below the branch above, which leaves out containers that are never called."""
    mark: Mark
    label: str
    """Wrong quantity and its stage; empty unless the first wrong place is here."""
    counts: dict[Mark, int]
    """Number of modules by state, those below included."""
    below: "list[Branch]"
    """Branches of one of the modules; none if all modules below are in the same state."""

    @property
    def name(self) -> str:
        """Names in one line: `attention`, `wq, wk, wv` or `layers.2 ... layers.79`."""
        return ", ".join(self.names) if len(self.names) <= _MAX_NAMES else f"{self.names[0]} ... {self.names[-1]}"

    @property
    def is_wrong(self) -> bool:
        """True if the first wrong place is here or below."""
        return bool(self.label) or self.mark == "wrong" or self.is_open

    @property
    def is_open(self) -> bool:
        """True if the first wrong place is below."""
        return any(branch.is_wrong for branch in self.below)

    @property
    def others(self) -> str:
        """Numbers of modules below in another state, `right 2, unseen 1`; empty if the rows below show them."""
        others = [f"{mark} {number}" for mark, number in self.counts.items() if mark != self.mark]
        return "" if self.is_open else ", ".join(others)


def branches(location: Location) -> list[Branch]:
    """Return the tree of a location, in the order of the model; empty if the location has no tree."""
    if not location.tree:
        return []
    root = _Node("", location.tree.get("", "unseen"))
    for path, mark in location.tree.items():
        root.add(path, mark)
    wrong, label = _label(location)
    (top,) = _branches(root, "", wrong, label)
    return [top] if "" in location.tree or not top.below else top.below


def tree_lines(location: Location) -> Iterator[str]:
    """Yield a line for each branch, indented; of branches without the first wrong place the topmost line."""
    yield from _lines(branches(location), "")


def _lines(shown: Sequence[Branch], indent: str) -> Iterator[str]:
    for branch in shown:
        others = f" (besides {branch.others})" if branch.others else ""
        yield f"{indent}{branch.name}: {', '.join(filter(None, (branch.mark, branch.label)))}{others}"
        if branch.is_open:
            yield from _lines(branch.below, f"{indent}  ")


class _Node:
    """Module with its children by name."""

    def __init__(self, path: str, mark: Mark) -> None:
        self.path, self.mark = path, mark
        self.children: dict[str, _Node] = {}

    def add(self, path: str, mark: Mark) -> None:
        """Add the module at a path; modules on the way that are not there yet are unseen."""
        node, words = self, path.split(".") if path else []
        for number, word in enumerate(words, 1):
            node = node.children.setdefault(word, _Node(".".join(words[:number]), "unseen"))
        node.mark = mark

    def is_seen(self) -> bool:
        """Return whether this module, or one below, was seen."""
        return self.mark != "unseen" or any(child.is_seen() for child in self.children.values())


def _label(location: Location) -> tuple[str, str]:
    """Return the path of the module at the first wrong place, and the wrong quantity with its stage."""
    path = location.name
    while path not in location.tree and path:
        path = path.rpartition(".")[0]
    parameter = location.name.removeprefix(path).removeprefix(".")
    return path, f"{', '.join(filter(None, (parameter, location.quantity)))} ({location.stage})"


def _branches(node: _Node, above: str, wrong: str, label: str) -> list[Branch]:
    """Return the branch of a module below that with the path `above`; of a container those of its children."""
    is_wrong = node.path == wrong
    is_container = bool(node.path) and node.mark == "unseen" and node.is_seen() and not is_wrong
    top = above if is_container else node.path
    below = [branch for child in node.children.values() for branch in _branches(child, top, wrong, label)]
    if is_container:
        return below
    below = _joined(below)
    counts = Counter[Mark]({node.mark: 1})
    for branch in below:
        counts.update(branch.counts)
    is_uniform = len(counts) == 1 and not any(branch.is_wrong for branch in below)
    return [
        Branch(
            names=(node.path.removeprefix(above).removeprefix(".") or _ROOT,),
            mark=node.mark,
            label=label if is_wrong else "",
            counts=dict(counts),
            below=[] if is_uniform else below,
        )
    ]


def _joined(separate: Sequence[Branch]) -> list[Branch]:
    """Return the branches, neighbours in the same state as one."""
    joined: list[Branch] = []
    for branch in separate:
        if joined and _are_alike(joined[-1], branch):
            counts = Counter(joined[-1].counts) + Counter(branch.counts)
            joined[-1] = replace(joined[-1], names=(*joined[-1].names, *branch.names), counts=dict(counts))
        else:
            joined.append(branch)
    return joined


def _are_alike(first: Branch, second: Branch) -> bool:
    is_wrong = first.is_wrong or second.is_wrong
    return not is_wrong and first.mark == second.mark and first.below == second.below
