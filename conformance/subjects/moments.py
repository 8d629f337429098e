"""Moments of a step of an owner's loop, seen from outside: an observer is told them, and the loop calls none.

A micro-batch begins when the model, or a module that FSDP has sharded, is called with gradients, and not inside of a
backward pass, where activation checkpointing computes again. A backward pass is a call of `torch.autograd.backward`,
which `Tensor.backward` makes. Gradients are those at the end of the last backward pass, or later, when `GradScaler` has
unscaled them, or one of torch's functions takes their norm; a loop that is declared not to clip may change them until
the optimizer steps. The step ends when each parameter that is trained has had a step of its optimizer, of which there
may be several; hooks of optimizers tell both.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from conformance.subjects.feeding import RunIsOver
from conformance.subjects.finding import ModelSearch, optimizers_of
from conformance.subjects.optimizers import joined, learning_rates, parameters_of
from conformance.subjects.protocol import StepObserver, SubjectMistake
from conformance.subjects.turns import Turn
from conformance.subjects.wrapping import replaced_everywhere
from reference_trainer.observer import Phase

_IN_ORDER = (
    "declare loss={MODULE: LOSS} in the order in which optimizers step, each once in a training step; other numbers of "
    "steps cannot be judged"
)
"""Advice for a loop whose turns are other ones than those that are declared."""
_SAME_LIMIT = 1e-6
"""Relative deviation of two limits of clipping that are the same number in fp32."""


class _Found(Protocol):
    """Run that gets the model and the optimizer of its loop."""

    model: nn.Module
    optimizer: Optimizer
    scale_in_clipping: float
    learning_rates: list[list[float]]
    out_of_turn: list[str]

    def found(self, by_turn: Sequence[Sequence[Optimizer]]) -> None:
        """Take notice that both are found, before the model first computes, with the optimizers of each turn."""


class Count:
    """Numbers of the moments of the present step."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self.calls = 0
        """Calls of the model itself."""
        self.backward_passes = 0
        self.clip_norms: list[Tensor] = []
        """Norms by which torch's functions have scaled gradients."""
        self.norms: list[Tensor] = []
        """Norms that torch's functions have returned."""
        self.clipped = False
        self.clipped_after = 0
        """Backward passes before the first optimizer stepped."""
        self.stepped: set[int] = set()
        """Parameters, by id, whose optimizer has stepped."""
        self.steppers: dict[frozenset[int], tuple[Optimizer, list[float]]] = {}
        """Optimizer that has stepped last of those with the same parameters, and its learning rates before it."""

    def agrees_with(self, micro_batches: int) -> bool:
        """Return whether the step can have been one of so many micro-batches."""
        return micro_batches in (self.micro_batches, self.calls, self.backward_passes)


class Moments:
    """Moments of the steps of one rank's run."""

    def __init__(
        self,
        run: _Found,
        observer: StepObserver,
        search: ModelSearch,
        *,
        turns: Sequence[Turn],
        first: int,
        accumulation: Sequence[int],
        max_norm: float,
        ended: Callable[[Count, int], None],
    ) -> None:
        """Prepare for steps from number `first` on, which have the micro-batches of `accumulation`.

        In each step the optimizer of the next of the `turns` steps.
        `ended` is called when a step has ended, with the moments in it and its number of micro-batches.
        """
        self._run, self._observer, self._search, self._ended = run, observer, search, ended
        self._first, self._accumulation, self._max_norm = first, accumulation, max_norm
        self._turns, self._stepping = turns, [frozenset[int]()]
        """Turns, and the parameters, by id, whose optimizers step in each."""
        self._made: list[Optimizer] = []
        self._optimizers: list[list[Optimizer]] = []
        """Optimizers of each turn."""
        self._is_found = False
        self._calling = ExitStack()
        self._taken = 0
        self._phase: Phase = "idle"
        self._count = Count()
        self._steps_out_of_turn: list[str] = []
        """Steps of other turns' optimizers in the present turn, as sentences."""
        self._in_backward = self._in_step = self._in_norm = 0

    def require_all_steps(self) -> None:
        """Raise SubjectMistake, with the moment that is missing, for a loop that has not taken all steps."""
        if self._is_over:
            return
        missing = f"the loop ended after {self._taken} of {len(self._accumulation)} steps: "
        if not self._is_found:
            raise SubjectMistake(
                f"{missing}no call of a model with the parameters of model= was seen{self._others}: names must be the "
                "same but for those of wrappers, and the model must be called, not its forward"
            )
        if not self._count.backward_passes:
            raise SubjectMistake(f"{missing}let it train on all of config.steps, or on all that its loader yields")
        raise SubjectMistake(f"{missing}no call of the optimizer's step was seen after the last backward pass")

    @property
    def _others(self) -> str:
        """Words about sharded modules that were called and have other parameters."""
        names = dict.fromkeys(self._search.sharded_others)
        return f"; {', '.join(names)}, sharded, has others" if names else ""

    @property
    def _step(self) -> int:
        return self._first + self._taken

    @property
    def _stepping_now(self) -> frozenset[int]:
        """Parameters, by id, whose optimizers step in the present turn."""
        return self._stepping[self._taken % len(self._turns)]

    @property
    def _is_over(self) -> bool:
        return self._taken == len(self._accumulation)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Open the context in which the loop must run, in which torch tells its moments."""
        with ExitStack() as stack:
            for owner, name, function in self._methods():
                stack.enter_context(patch.object(owner, name, function))
            stack.enter_context(replaced_everywhere(dict(self._functions())))
            for hook in (
                register_optimizer_step_pre_hook(self._before_optimizer),
                register_optimizer_step_post_hook(self._after_optimizer),
            ):
                stack.callback(hook.remove)
            stack.enter_context(self._calling)
            self._calling.enter_context(patch.object(nn.Module, "__call__", self._called(nn.Module.__call__)))
            yield

    def _methods(self) -> Iterator[tuple[type, str, Callable[..., Any]]]:
        make, unscale = Optimizer.__init__, GradScaler.unscale_

        @functools.wraps(make)
        def made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            if not self._in_step:
                self._made.append(optimizer)

        @functools.wraps(unscale)
        def unscaled(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:
            unscale(scaler, *args, **kwargs)
            if self._count.clip_norms:  # `GradScaler.step` unscales what was clipped before, by mistake
                self._run.scale_in_clipping = scaler.get_scale()
            else:
                self.before_clip()

        yield Optimizer, "__init__", made
        yield GradScaler, "unscale_", unscaled

    def _functions(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any]]]:
        yield torch.autograd.backward, self._around_backward(torch.autograd.backward)
        yield get_total_norm, self._around_norm(get_total_norm)
        yield clip_grad_norm_, self._around_clip(clip_grad_norm_)
        yield clip_grads_with_norm_, self._around_scaling(clip_grads_with_norm_)
        yield dist.init_process_group, _unless_initialized(dist.init_process_group)
        yield dist.destroy_process_group, _unless_default(dist.destroy_process_group)

    # Model

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            model = self._search.model_of(module, self._made)
            if model is not None and not self._is_found:
                self._find(model)
            return call(module, *args, **kwargs)

        return called

    def _find(self, model: nn.Module) -> None:
        self._calling.close()
        optimizers = optimizers_of(model, self._made)
        held = {id(parameter) for each in optimizers for parameter in parameters_of(each)}
        named = [(self._search.named(name), id(each)) for name, each in model.named_parameters()]
        several = len(self._turns) > 1
        self._stepping = [
            frozenset(each for name, each in named if turn.trains(name) and each in held)
            if several
            else frozenset(held)
            for turn in self._turns
        ]
        self._optimizers = self._by_turn(optimizers)
        self._run.model = model
        self._tell_optimizers()
        self._run.found(self._optimizers)
        self._is_found = True
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
        for module in (model, *sharded):  # before FSDP's own hooks, which gather
            module.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_pre_hook(self._count_call)

    def _tell_optimizers(self) -> None:
        self._run.optimizer = joined([each for own in self._optimizers for each in own])

    def _by_turn(self, optimizers: Sequence[Optimizer]) -> list[list[Optimizer]]:
        """Return the optimizers of each turn: one that holds parameters of several turns is the first one's."""
        by_turn: list[list[Optimizer]] = [[] for _ in self._turns]
        for each in optimizers:
            own = {id(parameter) for parameter in parameters_of(each)}
            by_turn[next((turn for turn, stepping in enumerate(self._stepping) if own & stepping), 0)].append(each)
        return by_turn

    def _count_call(self, *_unused: Any) -> None:
        self._count.calls += torch.is_grad_enabled() and not self._in_backward

    def _begin_forward(self, *_unused: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a graph must not break; the model itself, or what calls the graph, has told the beginning
        if self._in_backward or self._phase == "forward" or not torch.is_grad_enabled():
            return
        if self._is_over:
            raise RunIsOver
        self._count.micro_batches += 1
        self._tell("forward")

    # Backward pass and gradients

    def _around_backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def backward(*args: Any, **kwargs: Any) -> None:
            if self._in_backward or not self._is_found or self._is_over:
                function(*args, **kwargs)
                return
            if self._steps_out_of_turn:
                raise SubjectMistake(f"{self._steps_out_of_turn[0]}: {_IN_ORDER}")
            self._tell("backward")
            self._in_backward += 1
            try:
                function(*args, **kwargs)
            finally:
                self._in_backward -= 1
            self._count.backward_passes += 1
            if self._is_last_backward:
                self._observer.gradients(self._run.model, step=self._step)

        return backward

    @property
    def _is_last_backward(self) -> bool:
        """True if all micro-batches of the step can have had their backward pass."""
        count, expected = self._count, self._accumulation[self._taken]
        return max(count.micro_batches, count.calls, count.backward_passes) >= expected

    def before_clip(self) -> None:
        """Take the gradients as they are now for those that are clipped."""
        if self._count.backward_passes and not self._count.clipped and not self._is_over:
            self._observer.gradients(self._run.model, step=self._step)

    def _begin_clip(self) -> None:
        if self._phase != "clip":
            self.before_clip()
            self._tell("clip")

    # Clipping

    def _around_norm(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def norm(tensors: Any, *args: Any, **kwargs: Any) -> Tensor:
            tensors = [tensors] if isinstance(tensors, Tensor) else [*tensors]
            if not self._can_clip(tensors):
                return function(tensors, *args, **kwargs)
            self._begin_clip()
            self._count.norms.append(function(tensors, *args, **kwargs))
            return self._count.norms[-1]

        return norm

    def _around_clip(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(function)
        def clip(parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Tensor:
            if not self._can_clip(()):
                return function(parameters, max_norm, *args, **kwargs)
            self._require_limit(max_norm)
            parameters = [parameters] if isinstance(parameters, Tensor) else [*parameters]
            self._note_clipped(parameters)
            self._begin_clip()
            norm = function(parameters, max_norm, *args, **kwargs)
            self._count.clip_norms.append(norm)
            return norm

        return clip

    def _around_scaling(self, function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def scale(parameters: Any, max_norm: Any, total_norm: Tensor, *args: Any, **kwargs: Any) -> None:
            if self._can_clip(()):
                self._require_limit(max_norm)
                if self._phase != "clip" and not self._count.clip_norms:  # it began with a norm that is not torch's
                    self.before_clip()
                self._count.clip_norms.append(total_norm)
            function(parameters, max_norm, total_norm, *args, **kwargs)

        return scale

    def _note_clipped(self, parameters: Sequence[Tensor]) -> None:
        """Note that gradients of another turn are clipped."""
        given = {id(parameter) for parameter in parameters}
        if len(self._turns) > 1 and not given & self._stepping_now:
            self._run.out_of_turn.append(
                f"the loop clips gradients of {self._trained_by(given)} in the turn of {self._turn.module}, and none "
                "of those with which its optimizer steps"
            )

    def _can_clip(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether gradients can be clipped now: a norm of parameters, for a log, is no clipping."""
        if not self._is_found or self._is_over or not self._count.backward_passes or self._in_backward:
            return False
        own = {id(parameter) for parameter in self._run.model.parameters()}
        return not any(id(tensor) in own for tensor in tensors)

    def _require_limit(self, max_norm: Any) -> None:
        limit = float(max_norm)
        if not math.isclose(limit, self._max_norm, rel_tol=_SAME_LIMIT):
            raise SubjectMistake(
                f"the loop clips gradients to {limit:g}, and this run to {self._max_norm:.6g}: hand config.max_norm to "
                f"the loop, or declare max_norm={limit:g}"
            )

    # Optimizer

    def _before_optimizer(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        is_first_with_closure = not self._is_found and callable(closure)  # in which the model will be found
        if not is_first_with_closure and not self._is_own(optimizer):
            return None
        if not callable(closure) and self._is_out_of_turn(optimizer):
            return None
        self._in_step += 1
        self._count.steppers[_parameter_ids(optimizer)] = optimizer, learning_rates(optimizer)
        if self._in_step > 1:
            return None
        if callable(closure) and not self._count.backward_passes:
            args, kwargs = self._with_closure(closure, args, kwargs)
            return args, kwargs
        self._clipped()
        return None

    def _is_own(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer that steps is that of the run, or contains it.

        Raises SubjectMistake for one that the suite cannot follow.
        """
        if not self._is_found:
            return False  # as of torch's `get_state_dict`, which lets a new optimizer step to make its state
        if self._in_backward:
            raise SubjectMistake(
                "an optimizer steps inside of the backward pass, where gradients cannot be judged before they are "
                "used: let the loop step after it"
            )
        if optimizer is self._run.optimizer or self._in_step:
            return True
        own = {id(parameter) for parameter in parameters_of(self._run.optimizer)}
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        if held & own:
            return True
        if held and optimizer in self._made:
            raise SubjectMistake(
                f"a second optimizer ({type(optimizer).__name__}) steps parameters that the model of model= does not "
                "have: a loop that trains one model with one optimizer can be judged"
            )
        return False

    def _is_out_of_turn(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps in the turn of another one, beside it.

        Raises SubjectMistake if turns have another order.
        """
        if len(self._turns) == 1 or self._in_step:
            return False
        held = {id(parameter) for parameter in parameters_of(optimizer)}
        if held & self._stepping_now:
            is_early = self._taken > 0 and not self._count.backward_passes
            if is_early:
                before = self._turns[(self._taken - 1) % len(self._turns)].module
                self._run.out_of_turn.append(f"{self._told(optimizer, held)} in the turn of {before}, once too often")
            self._run.out_of_turn += self._steps_out_of_turn
            self._steps_out_of_turn.clear()
            return is_early
        told = f"{self._told(optimizer, held)} in the turn of {self._turn.module}"
        if not self._taken:
            raise SubjectMistake(f"{told}: {_IN_ORDER}")
        self._steps_out_of_turn.append(f"{told}, once too often")
        return True

    def _told(self, optimizer: Optimizer, held: Set[int]) -> str:
        return f"{type(optimizer).__name__}, which trains {self._trained_by(held)}, takes a step"

    @property
    def _turn(self) -> Turn:
        return self._turns[self._taken % len(self._turns)]

    def _trained_by(self, parameters: Set[int]) -> str:
        """Return the module that is trained in the first turn with some of the parameters, given by id."""
        turns = zip(self._turns, self._stepping, strict=True)
        return next((turn.module for turn, stepping in turns if parameters & stepping), "no turn")

    def _with_closure(
        self, closure: Callable[[], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of `step` with a closure that tells when it has computed the gradients."""

        def observed() -> Any:
            if self._count.clipped:
                raise SubjectMistake("the optimizer calls its closure more than once in a step: this cannot be judged")
            with torch.enable_grad():
                loss = closure()
            if self._is_found:
                self._clipped()
            return loss

        if len(args) > 1:
            return (args[0], observed, *args[2:]), kwargs
        return args, {**kwargs, "closure": observed}

    def _clipped(self) -> None:
        """Tell that the optimizer is about to change parameters."""
        if self._is_over:
            raise RunIsOver
        if self._count.stepped and self._count.clipped_after == self._count.backward_passes:
            return  # another optimizer of the same step
        if self._count.stepped:
            raise SubjectMistake(
                "a backward pass was seen before all optimizers of the model have stepped: step each after it, or, if "
                "each has a loss of its own, declare loss={MODULE: LOSS}, by the module that it trains, in their order"
            )
        if not self._count.backward_passes:
            raise SubjectMistake(
                "the optimizer steps, and no backward pass was seen since the last step: call loss.backward() in the "
                "loop, or torch.autograd.backward by its full name"
            )
        may_have_changed = self._max_norm == math.inf  # a loop may change gradients that it does not clip
        if may_have_changed or not self._is_last_backward:
            self.before_clip()
        self._count.clipped, self._count.clipped_after = True, self._count.backward_passes
        self._observer.clipped(self._run.model, norm=self._norm(), step=self._step)
        self._tell("optimizer")

    def _norm(self) -> Tensor | None:
        """Return the norm by which gradients were clipped; None if torch's functions have not seen it."""
        seen = self._count.clip_norms or self._count.norms
        is_one = len({id(norm) for norm in seen}) == 1  # others are norms of some parameters each
        return seen[0] if is_one else None

    def _after_optimizer(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self._in_step:
            return
        self._in_step -= 1
        if self._in_step or not self._is_found:
            return
        self._count.stepped |= {id(parameter) for parameter in parameters_of(optimizer)}
        if self._count.stepped >= self._stepping_now:
            self._take_steppers()
            self._tell("idle")
            if len(self._turns) == 1:  # a turn may compute the model several times
                self._ended(self._count, self._accumulation[self._taken])
            self._taken += 1
            self._count = Count()

    def _take_steppers(self) -> None:
        """Keep the learning rates of the step, and let an optimizer that has stepped replace one that has not.

        A loop may make an optimizer again, of the same parameters, and only one of the two steps.
        """
        own, steppers = self._optimizers[self._taken % len(self._turns)], self._count.steppers
        stepped = [steppers.get(_parameter_ids(each), (each, learning_rates(each))) for each in own]
        self._run.learning_rates.append([rate for _, rates in stepped for rate in rates])
        if [each for each, _ in stepped] != own:
            own[:] = [each for each, _ in stepped]
            self._tell_optimizers()

    def _tell(self, phase: Phase) -> None:
        self._phase = phase
        self._observer.phase(phase, step=self._step)


def _parameter_ids(optimizer: Optimizer) -> frozenset[int]:
    return frozenset(map(id, parameters_of(optimizer)))


def _unless_initialized(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `init_process_group` for a process that has the suite's group: the trainer uses that one."""

    @functools.wraps(function)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        return None if dist.is_initialized() else function(*args, **kwargs)

    return initialize


def _unless_default(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `destroy_process_group` that leaves the suite's group alone, which is needed after the loop."""

    @functools.wraps(function)
    def destroy(group: Any = None) -> Any:
        return None if group in (None, dist.group.WORLD) else function(group)

    return destroy
