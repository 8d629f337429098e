"""Signatures of defects are those of the catalogue, read without torch."""

import ast
import subprocess
import sys

import pytest

from conformance.defects import signatures as read
from conformance.defects.catalogue import defects
from conformance.defects.signatures import Signature, signatures


def test_signatures_are_those_of_the_catalogue() -> None:
    in_catalogue = {Signature(defect.id, defect.laws, defect.cells, defect.hangs) for defect in defects()}
    assert set(signatures()) == in_catalogue
    assert len(signatures()) == len(defects())


def test_signatures_need_no_torch() -> None:
    module = "conformance.defects.signatures"
    program = f"import sys; from {module} import signatures; signatures(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_computed_field_is_an_error() -> None:
    module = ast.parse("A = Defect(id='a', laws=laws_of('PAR'), cells='')")
    with pytest.raises(ValueError, match="malformed"):
        read._signatures_of(module)
