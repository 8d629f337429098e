"""Model of a subject in one process: its results in fp64, and the own errors of fp32 and bf16.

For models of others no bound on rounding errors can be derived from shapes. It is measured: one process trains in fp64,
and then in fp32 several times, with samples and micro-batches in other orders. The largest deviation of these is the
model's own error, and `laws` allow a parallel run a stated multiple of it.
"""

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from conformance.assertions import compare
from conformance.instruments.dispatch_tap import DispatchTap
from conformance.instruments.dtypes import DtypeAudit
from conformance.numerics.split_products import SplitProducts
from conformance.oracles.reference import clip_factor, total_norm
from conformance.subjects.advancing import advancing_buffers, buffers_of, put_back
from conformance.subjects.cells import Workload
from conformance.subjects.data import all_micro_batches, micro_batches, permuted, samples, to_dtype
from conformance.subjects.facts import OwnErrors
from conformance.subjects.measuring import MATMULS_IN_FORWARD
from conformance.subjects.optimizers import learning_rates
from conformance.subjects.protocol import Batch, Subject, SubjectMistake
from conformance.subjects.turns import Turn, turns_of

SEED = 0
ORDERS = 4
"""Number of fp32 runs, each with another order of sums."""
RANDOM_ABOVE = 1e-2
"""Relative deviation of gradients in fp32 that no rounding explains: the model is random. A parameter whose changes
deviate by more is changed by rounding alone."""
REFUSALS = (RuntimeError, TypeError, NotImplementedError)
"""Errors of a model or an optimizer that cannot compute in another dtype."""
_ROUNDING = 1e-5
"""Relative deviation of gradients of a doubled loss that is not told from rounding: a factor of 2 rounds nothing."""
Tensors = dict[str, Tensor]


@dataclass
class Trajectory:
    """Run of a model in one process; lists are by step, tensors by name of the parameter, in the dtype of the run."""

    initial: Tensors
    gradients: list[Tensors] = field(default_factory=list)
    parameters: list[Tensors] = field(default_factory=list)
    """Parameters after each step."""
    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    learning_rates: list[list[float]] = field(default_factory=list)
    by_products: list[list[str]] = field(default_factory=list)
    """Parameters that get a gradient, by step, for which the optimizer of another turn steps."""


def initial_model(subject: Subject, *, tied: bool) -> nn.Module:
    """Return the model of one process with its initial weights, the same at each call.

    Raises SubjectMistake for what cannot be a reference.
    """
    torch.manual_seed(SEED)
    model = subject.model(tied=tied)
    if not isinstance(model, nn.Module):
        raise SubjectMistake(f"model() returned a {type(model).__name__}: give a function that returns an nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SubjectMistake("model() has no parameter that requires a gradient")
    wrong = [name for name, p in model.named_parameters() if p.is_meta or p.dtype != torch.float32]
    if wrong:
        raise SubjectMistake(f"{wrong[0]} of model() is on the meta device, or not in fp32: the reference needs both")
    return model


def device_type(model: nn.Module) -> str:
    """Return the type of the device on which a model computes."""
    return next(model.parameters()).device.type


def aliases(model: nn.Module) -> dict[str, str]:
    """Return the name under which `named_parameters` has a tied parameter, by its other names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def promoted(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a model in a real dtype; complex buffers get the complex dtype of that precision.

    `Module.to` would make complex tensors real, and the reference wrong (`freqs_cis` of Llama).
    """
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = _in(dtype, parameter.data)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, _in(dtype, buffer))
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = torch.finfo(torch.float32).eps  # which torch takes in fp32; that of fp64 is another function
    return model


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex()) if dtype.itemsize >= torch.float32.itemsize else tensor
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


class Noise(Protocol):
    """Noise on gradients, see `conformance.subjects.noise`."""

    def on_weights(self, model: nn.Module) -> None:
        """Change the weights with which a run begins."""

    def in_step(self, step: int, gradients: Tensors) -> Tensors:
        """Return the noise on gradients, by name, with which the optimizer takes a step."""


def train(
    subject: Subject,
    workload: Workload,
    *,
    dtype: torch.dtype,
    order: int,
    max_norm: float | None,
    in_bf16: "InBf16 | None" = None,
    noise: Noise | None = None,
    clips_exactly: bool = False,
) -> Trajectory:
    """Train the model in one process; `order` 0 leaves samples and micro-batches as they come.

    In other orders an optimizer that multiplies matrices in 16 bits does so in two parts, see `split_products`.
    Without `max_norm` the limit of clipping is half of the first norm, see `half_of`. With `in_bf16` the model computes
    in bf16, and the weights that the optimizer updates stay in `dtype`. `noise` is added to gradients that are clipped,
    and is not among those that are returned. With `clips_exactly` the norm is brought down to the limit itself, without
    the 1e-6 that torch adds to it.
    """
    model = promoted(initial_model(subject, tied=workload.tied), dtype)
    turns = turns_of(subject)
    optimizers = [
        turn.subject.make_optimizer(
            [p for name, p in model.named_parameters() if p.requires_grad and turn.trains(name)]
        )
        for turn in turns
    ]
    torch.manual_seed(SEED + order)
    run = Trajectory(initial=_copies(model.named_parameters()))
    if noise is not None:
        noise.on_weights(model)
    first = [to_dtype(batch, dtype) for batch in all_micro_batches(subject, workload, step=0)]
    advancing = advancing_buffers(model, [turn.subject.loss for turn in turns], first)
    for step in range(len(workload.accumulation)):
        batches = [
            [to_dtype(batch, dtype) for batch in micro_batches(subject, workload, step=step, data_rank=rank)]
            for rank in range(workload.data_ranks)
        ]
        turn, optimizer = turns[step % len(turns)], optimizers[step % len(turns)]
        ordered = _reordered(batches, order, keeps_ranks_together=bool(advancing))
        run.losses.append(_accumulate(turn.subject, model, ordered, in_bf16=in_bf16, advancing=advancing))
        run.by_products.append(_by_products(model, turn))
        gradients = _gradients(model)
        run.gradients.append(gradients)
        run.norms.append(total_norm(gradients.values(), order=2.0))
        limit = half_of(run.norms[0]) if max_norm is None else max_norm
        norm = run.norms[-1]
        factor = min(1.0, limit / norm) if clips_exactly and norm else clip_factor(norm, max_norm=limit)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        if noise is not None:
            _add(model, noise.in_step(step, _gradients(model)))
        run.learning_rates.append(learning_rates(optimizer))
        with SplitProducts() if order else nullcontext():
            optimizer.step()
        model.zero_grad()
        run.parameters.append(_copies(model.named_parameters()))
    return run


def _gradients(model: nn.Module) -> Tensors:
    return _copies((name, p.grad) for name, p in model.named_parameters())


def _add(model: nn.Module, noise: Tensors) -> None:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            parameter.grad.add_(noise[name])


def _by_products(model: nn.Module, turn: Turn) -> list[str]:
    """Return the parameters of other turns that got a gradient in a turn, and forget these gradients."""
    found = [(name, p) for name, p in model.named_parameters() if p.grad is not None and not turn.trains(name)]
    for _name, parameter in found:
        parameter.grad = None
    return [name for name, _parameter in found]


def half_of(norm: float) -> float:
    """Return the limit of clipping for a run whose first norm is given: clipping must happen to be judged."""
    return norm / 2


def _accumulate(
    subject: Subject,
    model: nn.Module,
    batches: Sequence[Sequence[Batch]],
    *,
    in_bf16: "InBf16 | None" = None,
    advancing: Sequence[str] = (),
) -> float:
    """Add up the gradients of the mean loss of micro-batches; returns the loss.

    Buffers with the names in `advancing` begin as before the step for each list of micro-batches.
    """
    every = [*chain.from_iterable(batches)]
    total = sum(subject.count(batch) for batch in every)
    if not total:
        raise SubjectMistake("count() is 0 for all batches of a step: nothing counts")
    loss_sum, before = 0.0, buffers_of(model, advancing)
    begins = {id(own[0]) for own in batches}
    for batch in every:
        if id(batch) in begins:
            put_back(model, before)
        computing = in_bf16.computing(model) if in_bf16 else model
        with in_bf16.forward(model) if in_bf16 else nullcontext():
            loss = subject.loss(computing, batch)
        _require_loss(loss)
        torch.autograd.backward(loss / total)
        if computing is not model:
            _add_gradients(model, computing)
            put_back(model, buffers_of(computing, advancing))
        loss_sum += float(loss.detach())
    return loss_sum / total


def _add_gradients(masters: nn.Module, computed: nn.Module) -> None:
    """Add the gradients of a model in bf16 to those of its masters."""
    for master, parameter in zip(masters.parameters(), computed.parameters(), strict=True):
        if parameter.grad is not None:
            gradient = parameter.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad + gradient


def _require_loss(loss: object) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
        raise SubjectMistake(f"loss() returned a {type(loss).__name__}{shape}: return a scalar tensor, a sum of losses")
    if not loss.requires_grad:
        raise SubjectMistake("loss() returned a tensor without gradient: it must depend on the model's parameters")
    if not loss.isfinite():
        raise SubjectMistake(f"loss() returned {float(loss.detach())} in one process")


def _reordered(
    batches: Sequence[Sequence[Batch]], order: int, *, keeps_ranks_together: bool
) -> Sequence[Sequence[Batch]]:
    """Return the micro-batches of all ranks in another order, with their samples in another one: lists of any."""
    if not order:
        for batch in chain.from_iterable(batches):
            samples(batch)
        return batches
    lists = batches if keeps_ranks_together else [[batch] for batch in chain.from_iterable(batches)]
    places = torch.randperm(len(lists), generator=torch.Generator().manual_seed(order)).tolist()
    return [[permuted(batch, seed=order) for batch in lists[place]] for place in places]


def own_errors(
    runs: Sequence[Mapping[str, Tensor]],
    exact: Mapping[str, Tensor],
    origin: Tensors | None,
    *,
    in_fp32: OwnErrors | None = None,
) -> OwnErrors:
    """Return the largest deviations of some runs from a more accurate one; with an origin, of the change since then.

    The overall deviation of changes leaves out parameters whose changes are noise, see `RANDOM_ABOVE`. The gradient of
    a bias that a softmax or a norm behind it takes out again is rounding alone, of which Adam makes steps as long as
    any: it would raise the bound of all other parameters to its size. Of runs in bf16, in which larger deviations are
    usual, those `in_fp32` tell which ones are noise.
    """
    by_name = {
        name: max(_finite(compare.deviation(run[name], exact[name], origin[name] if origin else None)) for run in runs)
        for name in exact
    }
    told = in_fp32 or OwnErrors(by_name, 0.0)
    known = [name for name in exact if not origin or not is_noise(name, told)] or list(exact)
    start = origin or {name: torch.zeros_like(tensor) for name, tensor in exact.items()}
    size = compare.distance(*({name: tensors[name] for name in known} for tensors in (exact, start)))
    distances = [compare.distance(*({name: each[name] for name in known} for each in (run, exact))) for run in runs]
    return OwnErrors(by_name, max(distances) / size if size else max(distances))


def is_noise(name: str, in_fp32: OwnErrors) -> bool:
    """Return whether a parameter's changes are rounding alone, by the own errors of changes in fp32."""
    return in_fp32.by_name.get(name, 0.0) > RANDOM_ABOVE


def _finite(deviation: float) -> float:
    if deviation == float("inf"):
        raise SubjectMistake("gradients or parameters of model() are not finite in one process")
    return deviation


def require_deterministic(errors: OwnErrors) -> None:
    """Raise SubjectMistake for a model whose gradients depend on more than the order of sums."""
    if errors.overall > RANDOM_ABOVE:
        raise SubjectMistake(
            f"gradients of model() deviate by {errors.overall:.2g} from themselves with another seed and another order "
            "of samples: switch dropout off, and let no sample depend on others"
        )


def require_proportional(subject: Subject, workload: Workload, *, dtype: torch.dtype) -> None:
    """Raise SubjectMistake for a model whose gradients are not proportional to the loss that backward begins with.

    An autograd function that injects the gradient of an auxiliary loss takes no part in the division by what counts: it
    adds up over all micro-batches of one process, and is averaged over ranks. (`MoEAuxLossAutoScaler` is such a one.)
    """
    once, twice = (_first_gradients(subject, workload, dtype=dtype, factor=factor) for factor in (1.0, 2.0))
    wrong = [name for name in once if not _is_double(twice.get(name, once[name]), once[name])]
    if wrong:
        raise SubjectMistake(
            f"gradients of a doubled loss are not twice those of the loss, for {wrong[0]} and {len(wrong) - 1} more: a "
            "function that injects a gradient in backward (as of an auxiliary loss) is not divided by what counts; let "
            "model() and loss() add that loss instead, times count(batch)"
        )


def _first_gradients(subject: Subject, workload: Workload, *, dtype: torch.dtype, factor: float) -> Tensors:
    """Return the gradients of a factor times the loss of the first micro-batch."""
    model = promoted(initial_model(subject, tied=workload.tied), dtype)
    torch.manual_seed(SEED)
    batch = to_dtype(all_micro_batches(subject, workload, step=0)[0], dtype)
    torch.autograd.backward(subject.loss(model, batch) * factor)
    return _copies((name, p.grad) for name, p in model.named_parameters())


def _is_double(measured: Tensor, single: Tensor) -> bool:
    return float((measured - 2 * single).norm()) <= _ROUNDING * float(2 * single.norm())


class InBf16:
    """Way in which one process computes in bf16, with the dtypes of its matrix products in forward.

    `cast`: parameters and the model's inputs are cast to bf16, and gradients are added up in fp32, as FSDP2 does it; a
    model that computes with inputs of its own in fp32 raises. `autocast`: torch decides for each operation.
    """

    def __init__(self, kind: Literal["cast", "autocast"], kept: Sequence[str] = ()) -> None:
        """`kept` are names of parameters that stay in fp32, see `kept_in_fp32`."""
        self._kind, self._kept = kind, kept
        self._audit = DtypeAudit()
        self._tap = DispatchTap([self._audit.listen])

    @property
    def matmul_dtypes(self) -> list[str]:
        """Dtypes of the operands of all products so far, without those of layers that are kept in fp32."""
        return self._audit.facts().get(MATMULS_IN_FORWARD, [])

    def computing(self, masters: nn.Module) -> nn.Module:
        """Return the model that computes a micro-batch."""
        if self._kind == "autocast":
            return masters
        model = parameters_in_bf16(masters, self._kept)
        self._audit.tell_apart(dict.fromkeys(owners(model, self._kept), True))
        return model

    @contextmanager
    def forward(self, masters: nn.Module) -> Iterator[None]:
        """Open the context of a forward pass."""
        self._audit.phase("forward", step=0)
        with self._tap, torch.autocast(device_type(masters), torch.bfloat16, enabled=self._kind == "autocast"):
            yield
        self._audit.phase("backward", step=0)


def kept_in_fp32(subject: Subject, workload: Workload) -> list[str]:
    """Return the parameters that the model's code needs in fp32 when all others are in bf16.

    They are those of layers whose inputs the code casts to fp32, as of the router of a mixture of experts: they refuse
    weights in bf16. Empty if the model computes in bf16, or refuses that for another reason.
    """
    masters, batch = initial_model(subject, tied=workload.tied), all_micro_batches(subject, workload, step=0)[0]
    kept: list[str] = []
    while True:
        model = parameters_in_bf16(masters, kept)
        calling = _modules_that_raise(subject, model, batch)
        if calling is None:
            return kept
        own = {id(parameter) for module in calling[-1:] for parameter in module.parameters(recurse=False)}
        more = [name for name, parameter in model.named_parameters() if id(parameter) in own and name not in kept]
        if not more:
            return []
        kept += more


def _modules_that_raise(subject: Subject, model: nn.Module, batch: Batch) -> list[nn.Module] | None:
    """Return the modules, the innermost last, in whose forward a model refuses to compute; None if it computes."""
    calling: list[nn.Module] = []

    def enter(module: nn.Module, _inputs: Any) -> None:
        calling.append(module)

    def leave(*_unused: Any) -> None:
        calling.pop()

    for module in model.modules():
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
    try:
        with torch.no_grad():
            subject.loss(model, batch)
    except REFUSALS:
        return calling
    return None


def owners(model: nn.Module, names: Collection[str]) -> list[nn.Module]:
    """Return the modules that have some parameters, by their names in the model, themselves."""
    chosen = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    return [module for module in model.modules() if any(id(p) in chosen for p in module.parameters(recurse=False))]


def parameters_in_bf16(model: nn.Module, kept: Collection[str] = ()) -> nn.Module:
    """Return a copy of a model with its parameters in bf16, and its buffers as they are; it casts its inputs as FSDP2.

    Parameters with the names in `kept` stay as they are. The copy has no gradients.
    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html (`MixedPrecisionPolicy.cast_forward_inputs`)
    """
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.data = parameter.data if name in kept else parameter.data.to(torch.bfloat16)
    model.register_forward_pre_hook(_inputs_in_bf16, with_kwargs=True)
    return model


def _inputs_in_bf16(_model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    return to_dtype(inputs, torch.bfloat16), to_dtype(named, torch.bfloat16)


def _copies(named: Iterable[tuple[str, Tensor | None]]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in named if tensor is not None}
