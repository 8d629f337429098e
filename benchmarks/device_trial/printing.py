"""Values of a probe: lines `name<TAB>value` on standard output, which the trial collects."""

from collections.abc import Iterable


def tell(name: str, value: object) -> None:
    """Print one value at once, so that a probe that is cut off has printed all values until then."""
    print(f"{name}\t{value}", flush=True)


def printed_values(output: str) -> dict[str, str]:
    """Return the values in the output of a probe by name."""
    pairs = (line.partition("\t") for line in output.splitlines())
    return {name: value for name, tab, value in pairs if tab}


def yes(answers: Iterable[bool]) -> str:
    """Return `yes`, `no`, or how many answers of all are yes."""
    given = list(answers)
    return "yes" if all(given) else "no" if not any(given) else f"{sum(given)} of {len(given)}"
