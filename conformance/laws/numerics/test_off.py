"""OFF: parameters that are offloaded to the CPU are trained like parameters that are not."""

from collections.abc import Mapping

from conformance.assertions import compare
from conformance.assertions.fixtures import Measure, Run
from conformance.assertions.steps import compare_steps, compare_updates
from conformance.experiments.fsdp_policies import offload_with_mistakes
from conformance.judge.law import law
from conformance.judge.measurements import measure as report
from conformance.oracles.dtype_policy import expected_offloading, expected_places, optimizer_state
from conformance.oracles.pipeline import held_by
from conformance.plan.cells import Cell
from conformance.run.record import Record

CPU_OFFLOAD = (
    "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html#torch.distributed.fsdp.CPUOffloadPolicy"
)
NO_CPU_BACKEND = "No backend type associated with device type cpu"
REMEDY = 'init_process_group("cpu:gloo,cuda:nccl")'


@law("OFF-1", where="offload = cpu", gaps=["rerun-cost-combined", "large-models"], numbers=True, reference=CPU_OFFLOAD)
def test_cpu_offload_run_equals_one_without(run: Run, cell: Cell) -> None:
    """Norm, clipped gradients and optimizer steps of an offloaded run MUST equal those of the run without offload, in
    every bit if both compute on one kind of device.

    On a CUDA device the first gradients MUST be equal in every bit, and the CPU's norms and steps, which are rounded
    differently, MUST be those of one process on the same gradients. One law, since the first difference causes all
    others. Wrong if gradients are not clipped on the CPU, or by a rank's own norm, if the next micro-batch overwrites
    gradients, or if the parameters that step are not those that are gathered.
    """
    record, other = run(cell), run(cell.but(offload="none", pin_memory=False))
    if record.device_type == "cuda":
        first = "step0/gradient"
        compare.bits(record.select(f"{first}/"), other.select(f"{first}/"), name=first)
        compare_steps(record)
        compare_updates(record)
        return
    kinds = [f"step{step}/{kind}" for step in record.steps for kind in ("gradient", "clipped")]
    finals = [f"final/{kind}" for kind in other.kinds("final")]
    for kind in [*kinds, *finals]:
        compare.bits(record.select(f"{kind}/"), other.select(f"{kind}/"), name=kind)
    logged = {"losses": (record.losses, other.losses), "gradient norms": (record.grad_norms, other.grad_norms)}
    for name, (measured, expected) in logged.items():
        wrong = sum(a != b for a, b in zip(measured, expected, strict=True))
        detail, unit = f"{measured}, without offload {expected}", f"of {len(expected)} steps"
        compare.count(wrong, name=name, expected=0, detail=detail, unit=unit)


@law("OFF-2", where="implementation = fsdp2", gaps=["large-models"], reference=CPU_OFFLOAD)
def test_cpu_offload_state_is_in_host_memory(run: Run, cell: Cell) -> None:
    """All sharded parameters, their gradients and the optimizer's state MUST be in host memory if they are offloaded,
    page-locked if requested; unsharded parameters, activations and buffers on the device, as everything is without
    offload.

    Wrong if a group was sharded without the policy, the optimizer was built on the device, or a buffer was offloaded.
    """
    config, record = cell.config, run(cell)
    _report_state(record)
    for facts in record.ranks:
        expected = held_by(facts.mesh_coordinate.get("pp", 0), expected_offloading(config), config)
        wrong = _differences(facts.offloading, expected)
        detail = f"rank {facts.rank}: {', '.join(wrong[:4])}"
        compare.count(len(wrong), name="wrong policies", expected=0, detail=detail, unit="parameters")
        wrong = _differences(facts.places, expected_places(config, facts.places, device=record.device_type))
        detail = f"rank {facts.rank}: {', '.join(wrong[:4])}"
        compare.count(len(wrong), name="wrong places", expected=0, detail=detail, unit=f"of {len(facts.places)}")


def _report_state(record: Record) -> None:
    """Record the bytes of state that rank 0 holds; the law judges only their places."""
    state = tuple(f"final/{key}/" for key in optimizer_state(record.cell.config.optimizer))
    kinds = {"parameters": ("final/parameter/",), "gradients": ("step0/gradient/",), "optimizer state": state}
    for name, prefixes in kinds.items():
        held = sum(tensor.nbytes for key, tensor in record.shards[0].items() if key.startswith(prefixes))
        report(f"{name} of rank 0", held, kind="memory", unit="bytes")


def _differences(measured: Mapping[str, object], expected: Mapping[str, object]) -> list[str]:
    names = dict.fromkeys([*expected, *measured])
    return [
        f"{name} is {measured.get(name)}, expected {expected.get(name)}"
        for name in names
        if measured.get(name) != expected.get(name)
    ]


@law("OFF-3", where="offload = cpu and features = 1", reference=CPU_OFFLOAD)
def test_cpu_offload_mistakes_raise_on_every_rank(measure: Measure, cell: Cell) -> None:
    """Without a backend for CPU tensors the trainer MUST refuse to offload before it trains, and say what to write;
    torch MUST raise an error when gradients are clipped. Memory on the wrong device MUST raise torch's error.

    On every rank: none may hang, or go on with a norm of its own.
    """
    expected = {"trainer": REMEDY, "clip": NO_CPU_BACKEND, "to_empty": "FSDP parameters should be materialized"}
    wrong = []
    for rank, errors in enumerate(measure(offload_with_mistakes, cell)):
        messages = {name: getattr(errors, name) for name in expected}
        wrong += [f"rank {rank}, {name}: {messages[name]}" for name in expected if expected[name] not in messages[name]]
    unit = f"of {len(expected) * cell.world_size} messages"
    compare.count(len(wrong), name="mistakes not reported", expected=0, detail="; ".join(wrong[:4]), unit=unit)
