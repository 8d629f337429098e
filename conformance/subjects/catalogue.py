"""Catalogue of the laws for subjects."""

import importlib

from conformance.subjects.declaring import SUBJECT_LAWS

for _module in ("laws", "traffic_laws"):
    importlib.import_module(f"{__package__}.{_module}")  # declares its laws
LAWS = tuple(SUBJECT_LAWS)
"""All laws for subjects, in the order of reports."""
