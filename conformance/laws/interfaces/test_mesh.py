"""MESH: parameters of one model on several meshes have one norm, one step and one checkpoint."""

from conformance.assertions.fixtures import Measure
from conformance.assertions.sweeps import require_no_wrong_result
from conformance.judge.law import law
from conformance.plan.cells import Cell
from conformance.sweeps.several_meshes import checkpoint, clip, step, train

FULLY_SHARD = "https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html"
CLIP_GRAD_NORM = "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html"
OPTIM = "https://docs.pytorch.org/docs/stable/optim.html"
CHECKPOINT = "https://docs.pytorch.org/docs/stable/distributed.checkpoint.html"


@law(
    "MESH-1",
    where="id in (hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1, hsdp2x2-fp32-default-meta-seed1)",
    reference=FULLY_SHARD,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_gradients_of_several_meshes_equal_one_process(measure: Measure, cell: Cell) -> None:
    """Gradients of a model whose blocks lie on several meshes (FSDP, HSDP, FSDP within nodes, experts with another
    divide factor, tensor parallelism, named dimensions, plain tensors) MUST be those of one process, in every bit,
    after one backward pass, and after two of which the last is reduced.

    Wrong if a block is divided by the number of ranks of another one's mesh, or reduced over them.
    """
    require_no_wrong_result(measure(train, cell), unit="models")


@law(
    "MESH-2",
    where="id in (hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1, hsdp2x2-fp32-default-meta-seed1)",
    reference=CLIP_GRAD_NORM,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_gradients_of_several_meshes_are_clipped_by_one_norm(measure: Measure, cell: Cell) -> None:
    """Clipping gradients that lie on several meshes MUST return the norm of all of them, each element once, and scale
    all of them by it, for each order of the norm and with `foreach` or not; or refuse on all ranks.

    By `clip_grad_norm_`, by `get_total_norm` and `clip_grads_with_norm_`, and, as trainers do where torch refuses, by
    the norm of the norms of each mesh.
    """
    require_no_wrong_result(measure(clip, cell), unit="clippings")


@law(
    "MESH-3",
    where="id in (hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1, hsdp2x2-fp32-default-meta-seed1)",
    reference=OPTIM,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_optimizers_step_parameters_of_several_meshes(measure: Measure, cell: Cell) -> None:
    """An optimizer over parameters that lie on several meshes MUST leave, after three steps, the parameters and the
    state that it leaves on plain tensors, or refuse on all ranks.

    In every bit where an element depends on no other, else within the bound of OPT-3.
    """
    require_no_wrong_result(measure(step, cell), unit="models")


@law(
    "MESH-4",
    where="id in (hsdp2x2-fp32-default-meta-integer-sgd-noclip-steps1, hsdp2x2-fp32-default-meta-seed1)",
    reference=CHECKPOINT,
    since="2.13",
    substrates=("gloo",),  # as for DT-3
)
def test_checkpoint_of_several_meshes_is_loaded_onto_others(measure: Measure, cell: Cell) -> None:
    """A checkpoint of parameters and optimizer state that lie on several meshes MUST be loaded, in every bit, into a
    model whose blocks have changed their meshes, or be refused on all ranks.

    Through files as sharded and as flattened state, and as a full state dict.
    """
    require_no_wrong_result(measure(checkpoint, cell), unit="models")
