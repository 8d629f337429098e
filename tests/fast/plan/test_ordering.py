"""Order of cells: greedy, best first, by what each adds per second."""

from hypothesis import given
from hypothesis import strategies as st

from conformance.plan.ordering import Gains, best_first

NAMES = "abcdefgh"
GAINS = st.dictionaries(
    st.sampled_from(NAMES), st.dictionaries(st.integers(0, 9), st.sampled_from([0.25, 0.5, 1.0])), min_size=1
)
SECONDS = st.fixed_dictionaries({name: st.sampled_from([0.25, 0.5, 1.0, 4.0]) for name in NAMES})


def rate(name: str, gains: dict[str, Gains], seconds: dict[str, float], before: list[str]) -> float:
    """Return what a name adds to those before it, per second."""
    seen = {what for other in before for what in gains[other]}
    return sum(weight for what, weight in gains[name].items() if what not in seen) / seconds[name]


@given(GAINS, SECONDS)
def test_each_name_adds_most_of_those_left(gains: dict[str, Gains], seconds: dict[str, float]) -> None:
    """Values and durations are sums and powers of two: rates are exact, so that ties are ties."""
    ordered = best_first(list(gains), gains, seconds)
    assert sorted(ordered) == sorted(gains)
    for position, name in enumerate(ordered):
        before, left = ordered[:position], ordered[position:]
        rates = {other: rate(other, gains, seconds, before) for other in left}
        assert rates[name] == max(rates.values())
        earlier = [other for other in left if list(gains).index(other) < list(gains).index(name)]
        assert all(rates[other] < rates[name] for other in earlier), "ties keep their order"


@given(GAINS, SECONDS)
def test_the_order_is_the_same_each_time(gains: dict[str, Gains], seconds: dict[str, float]) -> None:
    assert best_first(list(gains), gains, seconds) == best_first(list(gains), gains, seconds)


def test_a_short_cell_comes_before_a_longer_one_that_adds_more() -> None:
    gains: dict[str, Gains] = {"long": {1: 1.0, 2: 1.0, 3: 1.0}, "short": {1: 1.0}, "same": {1: 1.0}}
    assert best_first(list(gains), gains, {"long": 4.0, "short": 1.0, "same": 1.0}) == ["short", "long", "same"]
