"""JUnit file of a session, which pytest writes with the properties of each case; properties of the suite are added."""

import xml.etree.ElementTree as ET
from pathlib import Path

from conformance.report.schema import CaseResult, Report

SUITE_NAME = "conformance"


def case_properties(result: CaseResult, *, torch_version: str) -> list[tuple[str, object]]:
    """Return the properties of a case, as pytest's `user_properties`."""
    return [
        ("law", result.law),
        ("cell", result.cell),
        ("verdict", result.verdict),
        ("substrate", result.substrate),
        ("torch", torch_version),
    ]


def name_suite(file: Path, report: Report) -> None:
    """Give the suite in a JUnit file its name, and properties that describe the session.

    pytest's own `junit_suite_name` is an ini option, which the configuration of the user's project would have to set.
    Raises OSError if the file cannot be read or written.
    """
    tree = ET.parse(file)
    for suite in tree.iter("testsuite"):
        suite.set("name", SUITE_NAME)
        properties = ET.Element("properties")
        for name, value in _suite_properties(report).items():
            ET.SubElement(properties, "property", name=name, value=value)
        suite.insert(0, properties)
    tree.write(file, encoding="utf-8", xml_declaration=True)


def _suite_properties(report: Report) -> dict[str, str]:
    properties = {
        "torch": str(report.environment["packages"]["torch"]),
        "profile": report.profile,
        "selection": report.selection,
        "defect": report.defect or "",
        "exit_code": str(report.exit_code),
    }
    return {name: value for name, value in properties.items() if value}
