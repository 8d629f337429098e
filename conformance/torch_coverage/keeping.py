"""Figures of profiles that docs/torch_coverage.json keeps, of which docs/torch_coverage.md is made."""

import msgspec

from conformance.plan.coverage import Tally
from conformance.project import PROJECT, require_checkout
from conformance.torch_coverage.counting import TorchCoverage

KEPT_FILE = PROJECT / "docs" / "torch_coverage.json"


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Coverage of torch that a profile's sessions have measured."""

    covered: TorchCoverage
    cases: Tally
    """Cases that were judged, of all of the profile."""


def read_kept() -> dict[str, Kept]:
    """Return the kept figures by profile; none if there is no file."""
    return msgspec.json.decode(KEPT_FILE.read_bytes(), type=dict[str, Kept]) if KEPT_FILE.exists() else {}


def keep(profile: str, kept_now: Kept) -> None:
    """Keep the figures of a profile in place of earlier ones. Raises UsageError outside of a checkout."""
    require_checkout("--keep")
    kept = {**read_kept(), profile: kept_now}
    KEPT_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
