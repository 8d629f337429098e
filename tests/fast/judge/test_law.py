"""Laws: a test that states a MUST."""

import pytest

from conformance.judge.law import Law, law, law_of
from conformance.plan.scopes import scope
from conformance.plan.substrates import REAL


def test_law_states_a_must() -> None:
    @law("PAR-7", where="tp = 1", reference="https://example.org", since="2.9")
    def test_it() -> None:
        """Shards MUST
        add up.

        Wrong if not.
        """  # noqa: D205 - a MUST may take several lines

    assert law_of(test_it) == Law(
        "PAR-7", "Shards MUST add up.", "https://example.org", "2.9", REAL, scope("PAR-7", where="tp = 1")
    )
    assert law_of(test_law_states_a_must) is None
    assert law_of(None) is None


@pytest.mark.parametrize("docstring", [None, "Shards must add up.", "Shards add up.\n\nThey MUST."])
def test_law_without_a_must_is_refused(docstring: str | None) -> None:
    def test_it() -> None:
        pass

    test_it.__doc__ = docstring
    with pytest.raises(ValueError, match=r"law PAR-7: .* test_it's docstring must say what MUST hold"):
        law("PAR-7", where="tp = 1", reference="")(test_it)
