"""Subjects that the suite and other packages register, and `conformance judge --list`."""

import ast
import importlib.metadata
import tomllib
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.project import PROJECT
from conformance.run import known_trainers

TARGET = "tests.support.subject_models:right"
METADATA = """\
Metadata-Version: 2.1
Name: {name}
Version: 1.5
Provides-Extra: subject-mine
Requires-Dist: numpy
Requires-Dist: msgspec>=0.1; extra == 'subject-mine'
Requires-Dist: torch<1; extra == 'subject-mine'
Requires-Dist: no-such-package==3; extra == 'subject-mine-elsewhere'
"""


def install(monkeypatch: pytest.MonkeyPatch, site: Path, package: str, **targets: str) -> None:
    """Let a package that registers subjects be installed."""
    directory = site / f"{package}-1.5.dist-info"
    directory.mkdir(parents=True)
    (directory / "METADATA").write_text(METADATA.format(name=package))
    entries = [f"{name.replace('_', '-')} = {target}" for name, target in targets.items()]
    (directory / "entry_points.txt").write_text("\n".join([f"[{known_trainers.GROUP}]", *entries]))
    monkeypatch.syspath_prepend(site)


def test_a_package_registers_subjects(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, tmp_path, "other-trainer", mine=TARGET, mine_elsewhere=TARGET, minefield=TARGET)
    assert main(["judge", "--list"]) == 0
    rows = {row.split()[0]: row.split()[1:] for row in capsys.readouterr().out.splitlines()[2:]}
    has, lacks = f"msgspec {importlib.metadata.version('msgspec')},", "no-such-package==3 (not installed)"
    old = f"torch<1 (installed: {importlib.metadata.version('torch')})"
    assert rows["mine"] == [TARGET, "other-trainer", "1.5", *has.split(), *old.split()]
    assert rows["mine-elsewhere"] == [TARGET, "other-trainer", "1.5", *has.split(), *f"{old}, {lacks}".split()]
    assert rows["minefield"] == [TARGET, "other-trainer", "1.5", "nothing", "more"]
    assert known_trainers.resolve("mine") == TARGET
    with pytest.raises(ValueError, match=r"`mine-elsewhere` needs .* not installed: pip install no-such-package==3$"):
        known_trainers.resolve("mine-elsewhere")


def test_a_name_of_two_packages_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path / "one", "one", mine=TARGET)
    install(monkeypatch, tmp_path / "two", "two", mine="elsewhere:mine")
    problem = rf"`mine` is registered by one 1.5 \({TARGET}\) and two 1.5 \(elsewhere:mine\): write MODULE:NAME$"
    with pytest.raises(ValueError, match=problem):
        known_trainers.resolve("mine")


PYPROJECT: dict[str, Any] = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
"""Metadata of the checkout, installed or not."""
OWN_SUBJECTS: dict[str, str] = PYPROJECT["entry-points"][known_trainers.GROUP]


@pytest.mark.parametrize(("name", "target"), OWN_SUBJECTS.items())
def test_the_suites_own_subjects_are_registered_by_their_names(name: str, target: str) -> None:
    """Their packages need not be installed here."""
    module, _, attribute = target.partition(":")
    tree = ast.parse((PROJECT / module.replace(".", "/")).with_suffix(".py").read_text())
    names = {name for node in tree.body for name in _bound_names(node)}
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == attribute)
    assert attribute in names
    for found in classes:
        assert f"name = '{name}'" in map(ast.unparse, found.body)


def _bound_names(node: ast.stmt) -> list[str]:
    """Return the names that a statement binds: a class, a decorated function, or a decorator that is called."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    return (
        [target.id for target in node.targets if isinstance(target, ast.Name)] if isinstance(node, ast.Assign) else []
    )


def test_every_extra_for_subjects_is_of_a_subject() -> None:
    extras = [extra for extra in PYPROJECT["optional-dependencies"] if extra.startswith("subject-")]
    assert len(extras) == 11
    assert {extra.removeprefix("subject-") for extra in extras} <= OWN_SUBJECTS.keys()
