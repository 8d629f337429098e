"""Annotations of failures in GitHub Actions, which shows lines that begin with `::error` on a run and its commit.

See https://docs.github.com/en/actions/reference/workflow-commands-for-github-actions.
"""

import os
from collections.abc import Sequence

from conformance.judge.verdicts import Verdict
from conformance.report.failure_groups import FailureGroup, failure_groups
from conformance.report.failure_text import causes, details, reason_text
from conformance.report.schema import Report

_MAX_ANNOTATIONS = 10  # GitHub shows no more errors of one step


def annotations(report: Report) -> list[str]:
    """Return a line for each cause of failures, those of most cases first; none outside of GitHub Actions."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    return [_annotation(cause) for cause in causes(failure_groups(report))[:_MAX_ANNOTATIONS]]


def _annotation(cause: Sequence[FailureGroup]) -> str:
    group = cause[0]
    kind = "warning" if group.verdict == Verdict.QUALITY_WARNING else "error"
    title = _escape(f"{group.verdict}: {group.cases[0].id}").replace(":", "%3A").replace(",", "%2C")
    message = _escape("\n".join([reason_text(group), *details(cause)]))
    return f"::{kind} title={title}::{message}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
