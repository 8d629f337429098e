"""OPT: which parameters the optimizer trains, and how it changes them."""

from collections import Counter
from functools import partial

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.steps import run_before_save, without_checkpoint
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.judge.law import law
from conformance.oracles.dtype_policy import optimizer_state
from conformance.oracles.frozen import trained
from conformance.oracles.pipeline import held_by
from conformance.oracles.plain_optimizer import Start, chosen_on_device, plain_updates
from conformance.oracles.reference import initial_model, learning_rate
from conformance.plan.cells import Cell
from conformance.sweeps.optimizer_calls import sweep as use_sweep
from conformance.sweeps.optimizers import pair_sweep, sweep

OPTIM = "https://docs.pytorch.org/docs/stable/optim.html"
FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"


@law("OPT-1", where="implementation = fsdp2", gaps=["large-models"], reference=FULLY_SHARD)
def test_optimizer_holds_the_sharded_parameters(run: Run, cell: Cell) -> None:
    """The optimizer MUST hold exactly the model's sharded parameters that train in any step, each once: matrices in the
    group with weight decay, norms and biases in the group without.

    Wrong if it was built before sharding, or while a group was unsharded: then it trains tensors that the model does
    not use.
    """
    config = cell.config
    decay, lr = config.optimizer.weight_decay, _spelled(learning_rate(config, config.steps))
    parameters = dict(initial_model(config).named_parameters())
    for facts in run(cell).ranks:
        own = held_by(facts.mesh_coordinate.get("pp", 0), parameters, config)
        expected = Counter((name, decay if p.ndim >= 2 else 0.0, lr) for name, p in trained(own, config).items())
        held = Counter(
            (name, group.weight_decay, _spelled(group.lr))
            for group in facts.optimizer_groups
            for name in group.parameters
        )
        wrong, missing = sorted((held - expected).elements()), sorted((expected - held).elements())
        detail = f"rank {facts.rank} holds {wrong[:3]} and misses {missing[:3]} (name, weight decay, learning rate)"
        unit = f"entries, of {expected.total()}"
        compare.count(len(wrong) + len(missing), name="wrong in the optimizer", expected=0, detail=detail, unit=unit)


@law("OPT-2", where="implementation = fsdp2", gaps=["large-models"], numbers=True, reference=FULLY_SHARD)
def test_optimizer_steps_as_on_plain_tensors(run: Run, cell: Cell) -> None:
    """On each rank the optimizer MUST leave parameters and state that torch's optimizer leaves on plain tensors of the
    same shards, in every bit: from the start of the run, or from the state that a checkpoint has restored.

    Wrong if DTensor changes an operation, an update is lost, a learning rate or decay is another than the schedule's,
    or a step counter of a resumed run begins anew. Gradients after clipping are those of the run.
    """
    record = run(cell)
    on_device = record.device_type != "cpu" and cell.config.offload == "none"
    config = chosen_on_device(cell.config) if on_device else cell.config
    device = record.kernel_type if on_device else "cpu"
    begins = record.steps[0] == 0
    when, steps_taken = ("initial", 0) if begins else ("resumed", _steps_taken_before(run, cell))
    kinds = set() if begins else {*optimizer_state(cell.config.optimizer)} & {*record.kinds("resumed")}
    for rank in range(cell.world_size):
        shards = partial(record.shards_below, rank=rank)
        gradients = {step: shards(f"step{step}/clipped/") for step in record.steps_taken}
        initial = shards(f"{when}/parameter/")
        start = Start(dict.fromkeys(initial, steps_taken), {kind: shards(f"{when}/{kind}/") for kind in kinds})
        expected = plain_updates(config, initial, gradients, start=start, device=device)
        for kind, tensors in expected.items():
            compare.bits(shards(f"final/{kind}/"), tensors, name=f"{kind} of rank {rank} after the last step")


@law(
    "OPT-3",
    where="id in (dp3-fp32-default-meta, dp2-tp2-fp32-default-meta-nosp)",
    reference=OPTIM,
    since="2.11",
    substrates=("gloo",),  # as for DT-3
)
def test_optimizers_step_on_dtensors_as_on_plain_tensors(measure: Measure, cell: Cell) -> None:
    """Every optimizer of torch.optim, with each implementation and option, MUST leave on DTensors of every layout the
    parameters and the state that it leaves on full plain tensors after several steps, or refuse on all ranks; on plain
    tensors each implementation MUST change every parameter as its documented algorithm does, and leave the state of the
    for-loop. Muon's momentum MUST be the average of gradients also in bf16.

    In every bit where an element depends on no other, else within a derived bound, as between implementations and
    against the algorithm, which is computed without torch (not for LBFGS). Refusals are bounded as in DT-3.
    """
    require_no_wrong_result(measure(sweep, cell), unit="layouts", bounded=f"OPT-3/{cell.id}")


@law(
    "OPT-4",
    where="id = dp2-fp32-default-meta-even",
    reference=OPTIM,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_options_of_optimizers_do_not_disturb_each_other(measure: Measure, cell: Cell) -> None:
    """Any two options of an optimizer together, with each implementation, MUST leave on DTensors the parameters and the
    state that they leave on full plain tensors after several steps, or refuse on all ranks.
    """
    require_no_wrong_result(measure(pair_sweep, cell), unit="options", bounded=f"OPT-4/{cell.id}")


@law(
    "OPT-5",
    where="id = dp2-fp32-default-meta-even",
    reference=OPTIM,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_optimizers_are_used_on_dtensors_as_on_plain_tensors(measure: Measure, cell: Cell) -> None:
    """Any two ways to use an optimizer together MUST leave on DTensors the parameters and the state that they leave on
    plain tensors, or be refused on all ranks.

    Closures, hooks of all kinds, several groups and added ones, gradients that add up or are zeroed, states that are
    saved and loaded, also from an old version, copies, parameters that are swapped in, and complex numbers.
    """
    require_no_wrong_result(measure(use_sweep, cell), unit="ways", bounded=f"OPT-5/{cell.id}")


def _steps_taken_before(run: Run, cell: Cell) -> int:
    """Return the number of steps that the optimizer of a resumed cell had taken when it was saved."""
    saved = run(without_checkpoint(cell) if cell.saved_on == "same" else run_before_save(cell))
    return sum(step < cell.steps_before_save for step in saved.steps_taken)


def _spelled(rate: float) -> str:
    """Return a learning rate without its last digits, which depend on the formula."""
    return f"{rate:.9g}"
