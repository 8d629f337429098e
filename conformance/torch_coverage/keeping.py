"""Figures of profiles that docs/torch_coverage.json keeps, of which docs/torch_coverage.md is made."""

import msgspec

from conformance.project import PROJECT, require_checkout
from conformance.torch_coverage.counting import TorchCoverage

KEPT_FILE = PROJECT / "docs" / "torch_coverage.json"


def read_kept() -> dict[str, TorchCoverage]:
    """Return the kept figures by profile; none if there is no file."""
    return msgspec.json.decode(KEPT_FILE.read_bytes(), type=dict[str, TorchCoverage]) if KEPT_FILE.exists() else {}


def keep(profile: str, covered: TorchCoverage) -> None:
    """Keep the figures of a profile in place of earlier ones. Raises UsageError outside of a checkout."""
    require_checkout("--keep")
    kept = {**read_kept(), profile: covered}
    KEPT_FILE.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
