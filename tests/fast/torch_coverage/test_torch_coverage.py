import inspect

import pytest

from conformance.plan.coverage import Tally
from conformance.report.torch_coverage import missing_lines
from conformance.torch_coverage import branches
from conformance.torch_coverage.areas import area_of_files
from conformance.torch_coverage.branches import functions, require_coverage
from conformance.torch_coverage.counting import count, targets
from conformance.torch_coverage.interfaces import described, interfaces, is_default
from conformance.torch_coverage.reasons import Reason, Target, left_on_purpose, read_reasons
from conformance.torch_coverage.seen import Seen
from reference_trainer.checks import UsageError

CLIP = "torch.nn.utils.clip_grad.clip_grad_norm_"
CLIP_FILE = "nn/utils/clip_grad.py"


@pytest.fixture
def one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Analyse the branches of one file of torch: all files take seconds of a processor."""
    assert area_of_files()[CLIP_FILE] == "clip_grad"
    monkeypatch.setattr(branches, "area_of_files", lambda: {CLIP_FILE: "clip_grad"})


def test_interfaces_are_read_from_signatures() -> None:
    known = {interface.name: [parameter.name for parameter in interface.parameters] for interface in interfaces()}
    assert known[CLIP] == ["parameters", "max_norm", "norm_type", "error_if_nonfinite", "foreach"]
    assert known["torch.distributed.fsdp.FSDPModule.set_requires_gradient_sync"] == [
        "requires_gradient_sync",
        "recurse",
    ]
    assert "param_dtype" in known["torch.distributed.fsdp.MixedPrecisionPolicy"]
    assert "pin_memory" in known["torch.distributed.fsdp.CPUOffloadPolicy"]
    assert not any("FullyShardedDataParallel" in name for name in known)
    assert len(known) == len(interfaces())


def test_values_are_described_in_short() -> None:
    assert [described(value) for value in (True, "full", [1, 1, 2], {"a": 1}, described)] == [
        "True",
        "'full'",
        "[1, 2]",
        "{int}",
        "function",
    ]


def test_only_an_equal_value_of_the_same_type_is_the_default() -> None:
    assert is_default(2.0, 2.0)
    assert not is_default(2, 2.0)
    assert not is_default(None, inspect.Parameter.empty)


@pytest.mark.usefixtures("one_file")
def test_figures_count_seen_parameters_and_pairs() -> None:
    seen = Seen(values={CLIP: {"norm_type": {"inf"}, "foreach": {"True"}}}, pairs={CLIP: {("foreach", "norm_type")}})
    area = count(seen, []).areas["clip_grad"]
    assert area.parameters.seen == 2 + 2  # and the two that have no default
    assert area.pairs.seen == 1
    assert area.branches.seen == 0 < area.branches.possible


@pytest.mark.usefixtures("one_file")
def test_a_jump_is_a_seen_branch() -> None:
    nothing = {(function.file, function.name): function for function in functions({})}
    place = (CLIP_FILE, "_get_total_norm")
    jump = min(nothing[place].missing)
    entered = {(-1, jump[0]), jump}
    again = {(function.file, function.name): function for function in functions({place[0]: entered})}
    assert again[place].seen == {jump}
    assert again[place].is_called
    assert not nothing[place].is_called


def test_reasons_match_targets_of_the_installed_torch() -> None:
    left = left_on_purpose(targets(Seen()), read_reasons())
    assert {target.area for target in left} >= {"tensor", "pipelining", "checkpoint"}


def test_a_reason_that_matches_nothing_is_refused() -> None:
    target = Target("parameter", "optim", "torch.optim.SGD", "lr", False)
    with pytest.raises(UsageError, match=r"matches `torch\.optim\.Gone`"):
        left_on_purpose([target], [Reason(places=["torch.optim.Gone"], reason="gone")])


def test_a_pattern_of_code_leaves_the_branches_that_lead_there() -> None:
    raising, other = (
        Target("branch", "optim", "optim/sgd.py:sgd", f"line 3 -> {line}", False, code=f"if lr < 0: -> {code}")
        for line, code in ((4, 'raise ValueError("lr")'), (5, "step()"))
    )
    parameter = Target("parameter", "optim", "torch.optim.SGD", "lr", False)
    reason = Reason(places=["*"], code="* -> raise *", reason="test")
    assert [*left_on_purpose([raising, other, parameter], [reason])] == [raising]


def test_branches_have_the_code_of_their_lines() -> None:
    codes = [target.code for target in targets(Seen()) if target.kind == "branch" and target.area == "clip_grad"]
    assert all(" -> " in code for code in codes)
    assert any(code.startswith("if error_if_nonfinite") and " -> raise RuntimeError" in code for code in codes)


def test_missing_lines_name_what_was_used_instead() -> None:
    found = [
        Target("parameter", "optim", "torch.optim.SGD", "lr", True, "0.5"),
        Target("parameter", "optim", "torch.optim.SGD", "fused", False),
        Target("function", "optim", "optim/sgd.py:sgd", "line 3", False),
        Target("branch", "optim", "optim/sgd.py:sgd", "line 3 -> 4", False),
    ]
    assert missing_lines(found, {}) == [
        "optim/sgd.py:sgd: never called, line 3, 1 branches",
        "torch.optim.SGD: parameters fused (seen: lr: 0.5)",
    ]


def test_seen_of_two_versions_is_not_added() -> None:
    with pytest.raises(UsageError, match="cannot be added"):
        Seen(torch="2.13.0").add(Seen(torch="2.12.0"))


def test_another_trainer_has_no_coverage() -> None:
    with pytest.raises(UsageError, match="leave out --subject"):
        require_coverage(is_of_reference=False)


@pytest.mark.usefixtures("one_file")
def test_what_is_left_is_not_possible() -> None:
    reason = Reason(places=[f"{CLIP_FILE}:*"], reason="test")
    area, whole = (count(Seen(), reasons).areas["clip_grad"] for reasons in ([reason], []))
    assert area.branches == Tally(0, 0)
    assert area.all_branches == whole.all_branches == whole.branches
