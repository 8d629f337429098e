"""Catalogue of the laws for subjects."""

import conformance.subjects.laws
import conformance.subjects.traffic_laws  # noqa: F401 - both declare laws
from conformance.subjects.declaring import SUBJECT_LAWS

LAWS = tuple(SUBJECT_LAWS)
"""All laws for subjects, in the order of reports."""
