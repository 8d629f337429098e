"""Ways of clipping that treat parameters unequally: by several norms, or without some of them.

Gradients are full tensors by name, of any shape and dtype.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from conformance.localisation.equality import CLOSE, multiple
from conformance.oracles.reference import clip_factor, total_norm

Gradients = Mapping[str, Tensor]
_TOLD = 3
"""Groups that a sentence names."""


@dataclass(frozen=True)
class _Group:
    """Parameters whose gradients are scaled by one factor."""

    names: Sequence[str]
    factor: float
    norm: float
    """2-norm of their gradients before clipping."""

    @property
    def is_scaled(self) -> bool:
        return not math.isclose(self.factor, 1.0, rel_tol=CLOSE)

    def is_clipped_by(self, norm: float, *, limit: float) -> bool:
        return math.isclose(self.factor, clip_factor(norm, max_norm=limit), rel_tol=CLOSE)


def unequal_factors(before: Gradients, after: Gradients, *, limit: float) -> Iterator[tuple[str, str]]:
    """Yield id and sentence of the way in which clipping to a limit has scaled groups by different factors.

    Nothing if it has scaled all by one, or the elements of a parameter unequally. Gradients that are zero tell nothing.
    """
    groups = _groups(before, after)
    if len(groups) < 2:
        return
    norm = total_norm(before.values(), order=2.0)
    scaled, others = [each for each in groups if each.is_scaled], [each for each in groups if not each.is_scaled]
    have_own = all(each.is_clipped_by(each.norm, limit=limit) for each in scaled)
    if have_own and len(scaled) > 1:
        told = ", ".join(f"{_noun(each.names, before)} ({each.norm:.4g})" for each in groups[:_TOLD])
        told += f" and {len(groups) - _TOLD} more" if len(groups) > _TOLD else ""
        yield (
            "norms-of-parts",
            f"parts of the model are clipped by norms of their own: {told}; not all by one norm ({norm:.4g})",
        )
    elif have_own and others:
        (left_out,) = others
        told = f"gradients of {_first(left_out.names)} are left out of clipping: neither in its norm nor scaled"
        own = f", or by a norm of their own, which is below the limit ({left_out.norm:.4g})"
        yield "left-out-of-clipping", told + (own if left_out.norm <= limit else "")
    elif others and len(scaled) == 1 and scaled[0].is_clipped_by(norm, limit=limit):
        told = f"gradients of {_first(others[0].names)} are not clipped: they are in the norm, and are not scaled"
        yield "not-all-scaled", told


def partial_norms(gradients: Gradients) -> Iterator[tuple[str, str, float]]:
    """Yield id, sentence and value of norms by which all gradients may have been clipped, and which lack some."""
    norm = total_norm(gradients.values(), order=2.0)
    for module in _modules(gradients):
        inside = [name for name in gradients if name.startswith(f"{module}.")]
        outside = [name for name in gradients if name not in inside]
        alone, without = (total_norm([gradients[name] for name in names], order=2.0) for names in (inside, outside))
        told = (
            f"all gradients are clipped by the norm of those of {module} alone ({alone:.4g}), not of all ({norm:.4g})"
        )
        yield "norm-of-a-part", told, alone
        told = (
            f"all gradients are clipped by a norm ({without:.4g}) that lacks those of {module}; with them: {norm:.4g}"
        )
        yield "norm-without-a-part", told, without


def _groups(before: Gradients, after: Gradients) -> list[_Group]:
    """Return the groups that have one factor each, in the order of parameters."""
    by_factor: list[tuple[float, list[str]]] = []
    for name, gradient in before.items():
        if not bool(gradient.any()):
            continue
        factor = multiple(after[name], gradient)
        if factor is None:
            return []
        same = next((names for each, names in by_factor if math.isclose(each, factor, rel_tol=CLOSE)), None)
        if same is None:
            by_factor.append((factor, [name]))
        else:
            same.append(name)
    return [
        _Group(names, factor, total_norm([before[name] for name in names], order=2.0)) for factor, names in by_factor
    ]


def _modules(names: Collection[str]) -> list[str]:
    """Return the paths of modules that have some of the parameters, and not all."""
    paths = dict.fromkeys(
        ".".join(steps[:end]) for steps in (name.split(".") for name in names) for end in range(1, len(steps))
    )
    return [path for path in paths if not all(name.startswith(f"{path}.") for name in names)]


def _noun(names: Sequence[str], every: Collection[str]) -> str:
    """Return the module that has just these parameters, or the first of them."""
    for module in _modules(every):
        if {name for name in every if name.startswith(f"{module}.")} == {*names}:
            return module
    return _first(names)


def _first(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
