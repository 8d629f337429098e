"""Made-up reports, for tests of their readers."""

from typing import Any

from conformance.judge.measurements import Measurement
from conformance.plan.coverage import CombinationCoverage, Coverage, LawCoverage, LeftOut, Tally
from conformance.report.facts import CellFacts, Collective
from conformance.report.location import Code, Location, Mark
from conformance.report.schema import CaseResult, Report

GATHER = Collective("forward", "all_gather", "dp_shard", "float32", 250)
FACTS = CellFacts(
    substrate="gloo",
    losses=[5.0, 4.0, 3.0],
    step_s=[0.1, 0.2],
    calibration_s=0.01,
    tokens_per_s=1.0,
    schedule=[GATHER] * 4,
)


COVERAGE = Coverage(
    pairs=CombinationCoverage(
        values=Tally(9, 10), features=Tally(1, 4), axes={"mesh": Tally(4, 4), "clip": Tally(5, 8)}
    ),
    triples=CombinationCoverage(
        values=Tally(2999, 3000), features=Tally(0, 2), axes={"mesh": Tally(0, 0), "clip": Tally(5, 8)}
    ),
    laws={
        "PAR-1": LawCoverage(
            pairs=9, cells=7, judged=4, left_out=[LeftOut(where="dropout > 0.0", reason="no <oracle>", cells=2)]
        ),
        "MEM-1": LawCoverage(pairs=None, cells=3, judged=3, left_out=[]),
    },
)


def case(name: str, verdict: str = "pass", **measured: Measurement) -> CaseResult:
    """A case, `LAW/CELL` or `LAW/TRAINER/CELL`, of this verdict."""
    law, *_, cell = name.split("/")
    nothing: dict[str, Any] = {"duration_s": 1.0, "wait_s": 0.0, "run_s": 0.0, "repro": "", "nodeid": name}
    return CaseResult(
        id=name,
        law=law,
        must="It MUST.",
        cell=cell,
        substrate="gloo",
        verdict=verdict,
        reason=f"why {verdict}",
        measured=measured,
        **nothing,
    )


def report(
    *cases: CaseResult, cells: dict[str, CellFacts] | None = None, torch: str = "2.13.0", **other: Any
) -> Report:
    """A report of these cases and facts of cells; `other` are fields of the report."""
    environment = {"packages": {"torch": torch}, "device": {"name": "Fake", "count": 2}}
    fixed: dict[str, Any] = {"session": "s", "profile": "pr", "seed": 0, "started": "2026-11-22T10:00:00"}
    fixed |= {"matrix_digest": "m", "defect": None, "selection": "", "exit_code": 0, "duration_s": 1.0, "verdicts": {}}
    fixed |= {"coverage": COVERAGE}
    fixed |= {"suite_digest": "d", "planned": len(cases), "executed": len(cases)}
    return Report(environment=environment, cases=list(cases), cells=cells or {}, **{**fixed, **other})


def location(case_id: str, **other: Any) -> Location:
    """First wrong place of a case, `LAW/CELL`; `other` are fields of the location."""
    fixed: dict[str, Any] = {
        "cell": case_id.split("/")[-1],
        "family": "tensor",
        "stage": "backward",
        "name": "layers.1.attention.wo",
        "quantity": "gradient of its input",
        "step": 0,
        "ranks": [1],
        "ranks_text": "tp rank 1 of 2",
        "module_class": "Linear",
        "equals": "0.5 x expected = 1/tp",
        "agrees": "its inputs agree to 3e-7",
        "collective": "all_reduce over tp between them: not issued",
        "called": Code(file="reference_trainer/model.py", line=12, function="forward"),
        "tree": model_tree(layers=2),
    }
    return Location(case=case_id, **(fixed | other))


def model_tree(*, layers: int) -> dict[str, Mark]:
    """Modules of a model in which the backward of `layers.1.attention.wo` is wrong."""
    tree: dict[str, Mark] = {"": "follows", "tok_embeddings": "follows", "layers": "unseen"}
    for layer in range(layers):
        mark: Mark = "follows" if layer < 2 else "right"
        tree[f"layers.{layer}"] = mark
        tree |= {f"layers.{layer}.{name}": mark for name in ("norm", "attention")}
        tree |= {f"layers.{layer}.attention.{name}": mark for name in ("wq", "wk", "wv")}
        tree |= {f"layers.{layer}.attention.dropout": "unseen", f"layers.{layer}.attention.wo": mark}
        tree |= {f"layers.{layer}.feed_forward": mark, f"layers.{layer}.feed_forward.w1": mark}
    wrong: dict[str, Mark] = {"layers.1.attention.wo": "wrong"}
    after: dict[str, Mark] = {f"layers.1.{name}": "right" for name in ("feed_forward", "feed_forward.w1")}
    return {**tree, **wrong, **after, "norm": "right", "output": "right"}


def bytes_of(value: float, *, lower: float | None = None, upper: float | None = None) -> Measurement:
    """A metric of memory."""
    return Measurement(kind="memory", value=value, lower=lower, upper=upper, unit="bytes")


def deviation(value: float | None) -> Measurement:
    """A rounding error with a bound that has a derivation, as laws measure it."""
    return Measurement(
        kind="rounding",
        value=value,
        lower=0.0,
        upper=1e-5,
        unit="relative Frobenius deviation",
        at="layers.0.attention.wk.bias",
        formula="u (3 F + sqrt(tokens))",
        terms={"u": 2.0**-24, "F": 105.0, "tokens": 256.0},
    )


def ratio(value: float) -> Measurement:
    return Measurement(kind="rounding", value=value, lower=0.5, upper=2.0, unit="ratio")


def count(value: float) -> Measurement:
    return Measurement(kind="exact", value=value, lower=value, upper=value, unit="tensors")


def seconds(value: float) -> Measurement:
    return Measurement(kind="time", value=value, lower=0.0, upper=5.0, unit="s")
