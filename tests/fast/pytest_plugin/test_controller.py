"""Controller of a session: a search for smallest failing cells that breaks off costs no report, and is told."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from conformance.pytest_plugin import controller
from conformance.pytest_plugin.controller import Controller
from tests.support.sample_reports import case, report

FAILED = report(case("PAR-1/dp2-fp32-default-meta-acc2-sgd", "fail"))


def test_a_bug_of_the_search_is_in_the_report_with_its_traceback() -> None:
    ended = Controller.__new__(Controller)
    ended._setup, ended._search_failure = SimpleNamespace(shrink_s=1.0), ""  # type: ignore[assignment]
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda _name: None))

    def broken(*_arguments: object) -> list[object]:
        raise KeyError("a bug")

    with (
        patch.object(controller, "has_combined", return_value=True),
        patch.object(controller, "smallest_cells", broken),
    ):
        shown = ended._with_smallest(FAILED, config)
    assert (shown.cases, shown.smallest) == (FAILED.cases, [])
    assert "in broken\n" in shown.search_failure
    assert shown.search_failure.endswith("KeyError: 'a bug'\n")
    assert ended._search_failure == (
        "no smallest failing cells: the search ended with KeyError: 'a bug'; report.json has the traceback"
    )
