"""Recorder of a subject: the suite's instruments around a step of the subject."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from conformance.instruments.capture import Capture
from conformance.instruments.collective_use import CollectiveUse
from conformance.instruments.collectives import CollectiveLog
from conformance.instruments.dispatch_tap import DispatchTap, OutcomeListener
from conformance.instruments.dtypes import DtypeAudit
from conformance.instruments.facts import Collective
from conformance.instruments.fsdp_state import GroupSettings, keeps_its_dtype, managed_parameters, settings_of
from conformance.instruments.saved_tensors import SavedTensors
from conformance.instruments.sharding import local
from conformance.instruments.taps import Line, Taps, is_compiled
from conformance.instruments.tensor_file import write_tensors
from conformance.instruments.writers import Writers
from conformance.run.shards import tensor_file
from conformance.sim import device as simulated
from conformance.subjects.accelerator import AcceleratorLog
from conformance.subjects.data import tensors
from conformance.subjects.facts import ShardedParameter, StepCalls, SubjectFacts
from conformance.subjects.loop import Loop, scalar
from conformance.subjects.memory_log import BUILD, MemoryLog
from conformance.subjects.optimizers import learning_rates
from conformance.subjects.protocol import Built, SubjectMistake, module_names, reference_name
from reference_trainer.observer import Phase

MATMULS_IN_FORWARD = "matmul/forward"
MATMULS_OF_KEPT_GROUPS = "matmul of kept groups/forward"


@contextmanager
def uninitialised_is_nan() -> Iterator[None]:
    """Let torch fill new memory with NaN, or the largest integer, so that zero pages cannot pass for initialised.

    https://docs.pytorch.org/docs/stable/deterministic.html#torch.utils.deterministic.fill_uninitialized_memory
    """
    filled = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    deterministic, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(True, warn_only=True)
        if not torch.empty(1).isnan():
            raise RuntimeError(f"torch {torch.__version__} does not fill uninitialised memory: INIT cannot be judged")
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = filled  # type: ignore[attr-defined]


def uninitialised_elements(tensor: Tensor, *, device: torch.device) -> int:
    """Return the number of elements of this rank's shard, of any shape and dtype, that look uninitialised on a device.

    A buffer may hold such values by design, see `ReferenceFacts.sentinels`. Booleans never look so. Integers of new
    memory have all bits set on the simulated accelerator, which fills memory itself.
    """
    shard = local(tensor)
    if shard.is_floating_point() or shard.is_complex():
        return int(shard.isnan().sum())
    if shard.dtype == torch.bool:
        return 0
    limits = torch.iinfo(shard.dtype)
    fresh = -1 if device.type == simulated.NAME and limits.min < 0 else limits.max
    return int((shard == fresh).sum())


class _SeesPhases(Protocol):
    def phase(self, name: Phase, *, step: int) -> None: ...


class SubjectRecorder:
    """Observer of one rank of a subject, see `protocol.StepObserver`, and the facts that it leaves."""

    def __init__(
        self,
        run: Built,
        *,
        names: Collection[str],
        aliases: Collection[str],
        last_step: int,
        begin: Callable[[Built], None],
        memory: MemoryLog,
        noted: Callable[[Collective], None] | None = None,
        writers: Writers | None = None,
        accelerator: AcceleratorLog | None = None,
        saved: SavedTensors | None = None,
        is_tensor_parallel: bool = False,
        kept_in_fp32: Collection[str] = (),
    ) -> None:
        """Make the instruments; `writers`, which have seen the run being built, add `taps` of all modules.

        `noted` is called with each collective that this rank issues.
        `memory` and `accelerator` have been there before the run was built.
        """
        self._begin, self._kept_in_fp32 = begin, frozenset(kept_in_fp32)
        self._is_begun, self._last_step = False, last_step
        self._run, self._names, self._known = run, frozenset(names), frozenset([*names, *aliases])
        trained = {"is_trained": run.is_trained} if hasattr(run, "is_trained") else {}
        self._capture = Capture(named=self._named, **trained)
        self._dtypes, self._collectives = DtypeAudit(), CollectiveLog(noted)
        self._collectives.parameters = self._own_parameters = set[int]()
        self._writers, self.taps = writers, self._new_taps() if writers else None
        listeners = [self._dtypes.listen, self._collectives.listen, *([self.taps.listen] if self.taps else [])]
        outcomes: list[OutcomeListener] = [each.listen_to_outcomes for each in (self.taps, writers) if each]
        self._memory, self._accelerator, self._saved = memory, accelerator, saved
        self._saved_bytes: dict[int, int] = {}
        outcomes += [accelerator.trace.listen] if accelerator else []
        outcomes += memory.memory.listeners
        self._use: CollectiveUse | None = None
        if is_tensor_parallel:
            self._use = CollectiveUse(count_collectives=self._collectives.count, settle=memory.memory.settle)
            outcomes.append(self._use.listen_to_outcomes)
        self._tap = DispatchTap(listeners, outcomes=outcomes)
        self._written: dict[str, Line] = {}
        self._sharded: dict[str, nn.Parameter] = {}
        self._ended_step = BUILD
        self._step = BUILD
        self._norms: list[float] = []
        self._uninitialised: dict[str, int] = {}
        self._parameters: dict[str, ShardedParameter] = {}
        self._gathered: dict[str, ShardedParameter] = {}
        self._below_fsdp: set[str] = set()
        self._unsharded: list[str] = []
        self._unsharded_for_others: list[str] = []
        self._phase: Phase = "build"
        self._calls: Counter[str] = Counter()
        self._step_calls: dict[int, tuple[Counter[str], Counter[str]]] = {}
        self._first_backward: dict[int, int] = {}
        self._clipped = 0
        self._logged_norms: list[float] = []
        self._before_clip: int | None = None
        self._groups: list[GroupSettings] = []
        self._fed_with_data: set[str] = set()
        self._learning_rates: list[list[float]] = []
        self._by_products: list[str] = []

    def _new_taps(self) -> Taps:
        return Taps(
            named=module_names(self._known),
            quietly=lambda: self._tap.deaf(),
            count_collectives=self._collectives.count,
        )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Open the context in which steps must take place."""
        with self._tap, self._saved.installed() if self._saved else nullcontext():
            yield

    @contextmanager
    def not_listening(self) -> Iterator[None]:
        """Open a context inside of `listening` that is no part of the training; its memory counts."""
        with self._tap.paused(), self._memory.listening():
            yield

    def replace(self, run: Built) -> None:
        """Go on with another run, which loads the state of the first one; `built` is called next."""
        self._logged_norms += getattr(self._run, "norms", [])
        self._learning_rates += getattr(self._run, "learning_rates", [])
        self._run = run

    @torch.no_grad()
    def built(self) -> None:
        """Look at the model that the subject has built, and call `begin`; of a run that goes on, look at names alone.

        Must be called inside of `listening`. Raises SubjectMistake if it is another model.
        """
        with self.unseen():
            if self._is_begun:
                self._require_known([self._named(name) for name, _ in self._run.model.named_parameters()])
                self._hook(self._run.model)
                if self.taps:
                    self._capture.resumed(self._run.model, self._run.optimizer)
            else:
                self._is_begun = True
                self._look_at(self._run.model)
                self._begin(self._run)
                self._memory.hold(self._run.model, self._run.optimizer, step=BUILD)
            self._sharded = dict(self._run.model.named_parameters())
            if self.taps:
                self.taps.attach(self._run.model)

    def _look_at(self, model: nn.Module) -> None:
        parameters = {self._named(name): parameter for name, parameter in model.named_parameters()}
        self._require_known(parameters)
        state = {**parameters, **{self._named(name): buffer for name, buffer in model.named_buffers()}}
        on_meta = sorted(name for name, tensor in state.items() if tensor.is_meta)
        if on_meta:
            raise SubjectMistake(f"{on_meta[0]} and {len(on_meta) - 1} more are on the meta device: materialise them")
        counts = {name: uninitialised_elements(tensor, device=local(tensor).device) for name, tensor in state.items()}
        self._uninitialised = {name: count for name, count in counts.items() if count}
        self._written = self._writers.written(state) if self._writers else {}
        self._parameters = {name: _layout_of(parameter) for name, parameter in parameters.items()}
        self._capture.initialized(model)
        self._dtypes.initialized(model)
        self._hook(model)

    def _hook(self, model: nn.Module) -> None:
        """Look at the parameters of modules that FSDP2 has sharded when these compute, and count how often.

        A parameter that modules of two groups share is gathered by both.
        """
        modules = dict(model.named_modules(remove_duplicate=False))
        groups = {path: module for path, module in modules.items() if isinstance(module, FSDPModule)}
        by_policy = {modules[path]: keeps_its_dtype(module) for path, module in groups.items()}
        self._dtypes.tell_apart(by_policy | dict.fromkeys(self._kept_layers(model), True))
        used: dict[nn.Module, dict[str, str]] = {}
        self._own_parameters.update(map(id, model.parameters()))
        self._leave_out(model)
        own_names = {id(parameter): self._named(name) for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            above = [group for group in groups if not group or name.startswith(f"{group}.")]
            if above:
                group = max(above, key=len)
                below = name.removeprefix(f"{group}.") if group else name
                used.setdefault(modules[group], {})[below] = own_names[id(parameter)]
        for module, names in used.items():
            self._below_fsdp |= {*names.values()}
            path = next(path for path, each in modules.items() if each is module)
            module.register_forward_pre_hook(partial(self._enter, path, names), with_kwargs=True)

    def _kept_layers(self, model: nn.Module) -> Iterator[nn.Module]:
        """Yield the layers that stay in fp32 as the owner's code says: by casts, or by ignored parameters."""
        managed = managed_parameters(model)
        names = {id(parameter): self._named(name) for name, parameter in model.named_parameters()}
        for module in model.modules():
            own = [*module.parameters(recurse=False)]
            if any(names[id(each)] in self._kept_in_fp32 or (managed and id(each) not in managed) for each in own):
                yield module

    def _enter(self, path: str, names: Mapping[str, str], module: nn.Module, *inputs: Any) -> None:
        """See the parameters of a group, which FSDP2 has gathered, as a module of it computes.

        `names` has the names of parameters in the model of one process, by their names in the module. Within a graph of
        `torch.compile` the hook does nothing, as a whole graph must not break.
        """
        if torch.compiler.is_compiling() or self._phase != "forward":
            return
        self._calls.update({*names.values()})
        self._leave_out(module)
        if not any(tensor.requires_grad for tensor in tensors(inputs)):
            self._fed_with_data.add(path)
        if not self._gathered.keys() >= {*names.values()}:
            for key, parameter in module.named_parameters(remove_duplicate=False):
                found = _layout_of(parameter)
                if key in names and len(found.shard_ranks) <= len(self._gathered.get(names[key], found).shard_ranks):
                    self._gathered[names[key]] = found

    def _leave_out(self, module: nn.Module) -> None:
        """Let the ledger of saved activations leave out the state of a module, as it is gathered at present."""
        if self._saved:
            self._saved.leave_out([*module.parameters(), *module.buffers()])

    def phase(self, name: Phase, *, step: int) -> None:
        """Tell instruments the phase that begins."""
        if self._saved:
            self._saved.is_on = name == "forward"
            if name == "backward":
                self._saved_bytes[step] = max(self._saved.held_bytes, self._saved_bytes.get(step, 0))
        if name in ("forward", "backward"):
            self._before_clip = None
        if name == "backward":
            _, total = self._step_calls.setdefault(step, (self._calls.copy(), Counter()))
            total.update(self._calls)
            if not self._groups:
                names = {id(parameter): self._named(name) for name, parameter in self._sharded.items()}
                self._groups = settings_of(self._run.model, names)
            self._calls.clear()
            self._first_backward.setdefault(step, self._collectives.count())
        if name == "idle" or step != self._step:
            self._end_step()
        self._phase, self._step = name, step
        if self._use:
            self._use.is_on = name in ("forward", "backward")
        observers: tuple[_SeesPhases | None, ...] = (self.taps, self._writers, self._accelerator)
        for instrument in filter(None, observers):
            instrument.phase(name, step=step)
        self._dtypes.phase(name, step=step)
        self._collectives.phase(name, step=step)
        self._memory.phase(name, step=step)

    def _end_step(self) -> None:
        """Keep the results of a step, once: a trainer may not tell that it is idle."""
        if self._step <= self._ended_step:
            return
        self._ended_step = self._step
        with self.unseen(), torch.no_grad():
            self._memory.hold(self._run.model, self._run.optimizer, step=self._step)
            if self.taps:
                self._capture.after_step(self._sharded, self._run.optimizer, step=self._step)
            if self._step == self._last_step:  # a loop may put other weights into its model at its end, as averages
                self._capture.final(self._run.model, self._run.optimizer, parameters=self._sharded)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Open a context for the suite's own operators, which instruments leave out."""
        with ExitStack() as stack:
            stack.enter_context(self._tap.paused())
            stack.enter_context(self._memory.paused())
            if self._accelerator:
                stack.enter_context(self._accelerator.unseen())
            yield

    def gradients(self, model: nn.Module, *, step: int) -> None:
        """Keep the gradients."""
        if not step:
            named = [self._named(name) for name, each in model.named_parameters() if each.grad is not None]
            self._by_products = [name for name in named if not self._is_trained(name, step)]
        with self.unseen(), torch.no_grad():
            self._capture.gradients(model, sharded=self._sharded, step=step)
            self._dtypes.gradients(model, step=step)
        if self._before_clip is None:
            self._before_clip = self._collectives.count()

    def clipped(self, model: nn.Module, *, norm: Tensor | None, step: int) -> None:
        """Keep the clipped gradients and their norm.

        If nobody told that clipping began, it was when gradients were reduced, as they were first told to be.
        """
        self._clipped += 1
        if not hasattr(self._run, "learning_rates"):
            self._learning_rates.append(learning_rates(self._run.optimizer))
        if self._phase != "clip" and self._before_clip is not None:
            self._collectives.rename_phase("clip", since=self._before_clip)
        with self.unseen(), torch.no_grad():
            known = torch.tensor(torch.nan) if norm is None else torch.as_tensor(norm)
            self._norms += [] if norm is None else [scalar(known)]
            self._capture.clipped(model, norm=known, step=step)
            layouts = {self._named(name): _layout_of(parameter) for name, parameter in model.named_parameters()}
        for name, layout in layouts.items():
            if layout != self._parameters.get(name):
                found = self._unsharded if self._is_trained(name, step) else self._unsharded_for_others
                found.append(f"step{step}: {name}")

    def _is_trained(self, name: str, step: int) -> bool:
        """Return whether the optimizer that steps in a step has a parameter, where several take turns."""
        told = getattr(self._run, "is_trained", None)
        return told is None or bool(told(name, step))

    @torch.no_grad()
    def finish(self, losses: Sequence[float], directory: Path) -> SubjectFacts:
        """Keep the final state, and write all tensors; returns the facts of this rank.

        A trainer's own loop may tell no losses, and norms for some steps alone, which are left out then. Raises
        SubjectMistake if a step, or that the model was built, was not told.
        """
        if not self._is_begun:
            raise SubjectMistake("train() did not call observer.built()")
        if losses and self._clipped != len(losses):
            raise SubjectMistake(f"{len(losses)} steps were taken, and {self._clipped} were told to the observer")
        if len(self._first_backward) != self._clipped:
            told = f"the backward passes of {len(self._first_backward)} were told"
            raise SubjectMistake(
                f"{self._clipped} steps were taken, and {told}: call observer.phase('backward', step=...)"
            )
        run, rank = self._run, dist.get_rank()
        self._end_step()
        write_tensors(directory / tensor_file(rank), self._capture.tensors)
        dtypes = self._dtypes.facts()
        return SubjectFacts(
            rank=rank,
            data_rank=run.data_rank,
            parameters={name: self._with_fsdp(name, layout) for name, layout in self._parameters.items()},
            fingerprints=self._capture.fingerprints,
            layouts=self._capture.layouts,
            losses=list(losses),
            grad_norms=self._norms_of_steps(),
            untied=sorted(self._parameters.keys() - self._names),
            held=self._held(run.model, run.optimizer),
            uninitialised=self._uninitialised,
            matmul_dtypes=dtypes.get(MATMULS_IN_FORWARD, []),
            gradient_dtypes=sorted({d for key, of in dtypes.items() if key.startswith("gradient/") for d in of}),
            collectives=self._collectives.facts(None),
            first_backward=list(self._first_backward.values()),
            calls=[StepCalls(dict(first), dict(total)) for first, total in self._step_calls.values()],
            unsharded=self._unsharded,
            unsharded_for_others=self._unsharded_for_others,
            written=self._written,
            sharding=self._writers.sharding if self._writers else [],
            accelerator=self._accelerator.facts() if self._accelerator else None,
            scale_in_clipping=getattr(run, "scale_in_clipping", 1.0),
            out_of_turn=getattr(run, "out_of_turn", []),
            by_products=self._by_products,
            kept_matmul_dtypes=dtypes.get(MATMULS_OF_KEPT_GROUPS, []),
            learning_rates=self._learning_rates + getattr(run, "learning_rates", []),
            by_suite=run.by_suite if isinstance(run, Loop) else [],
            is_own_model=getattr(run, "makes_own_model", False),
            memory=self._memory.facts(),
            groups=self._groups,
            saved_bytes=list(self._saved_bytes.values()),
            fed_with_data=sorted(self._fed_with_data),
            needless=self._use.facts() if self._use else [],
            is_compiled=any(map(is_compiled, run.model.modules())),
        )

    def _with_fsdp(self, name: str, layout: ShardedParameter) -> ShardedParameter:
        """Return a layout with the groups among which FSDP2 shards the parameter."""
        if name not in self._below_fsdp:
            return layout
        gathered = self._gathered.get(name)
        shards, replicas = (gathered.shard_ranks, gathered.replica_ranks) if gathered else ([], [])
        return msgspec.structs.replace(
            layout,
            is_below_fsdp=True,
            fsdp_ranks=[ranks for ranks in layout.shard_ranks if ranks not in shards],
            fsdp_replica_ranks=[ranks for ranks in layout.replica_ranks if ranks not in replicas],
        )

    def _norms_of_steps(self) -> list[float]:
        """Return the norms that the trainer logs, or by which torch clipped; none if some step's is not known."""
        logged = self._logged_norms + getattr(self._run, "norms", [])
        return next((norms for norms in (logged, self._norms) if len(norms) == self._clipped), [])

    def _named(self, name: str) -> str:
        return reference_name(name, self._known)

    def _require_known(self, parameters: Collection[str]) -> None:
        missing, unknown = sorted(self._names - set(parameters)), sorted(set(parameters) - self._known)
        if missing or unknown:
            raise SubjectMistake(
                f"the parallel model lacks parameters {missing[:3]} of the model of one process, and has "
                f"{unknown[:3]} which that lacks: both must have the same names, but for those of wrappers"
            )

    def _held(self, model: nn.Module, optimizer: Optimizer) -> list[str]:
        names = {id(parameter): self._named(name) for name, parameter in model.named_parameters()}
        return [names.get(id(parameter), "?") for group in optimizer.param_groups for parameter in group["params"]]


def _layout_of(parameter: nn.Parameter) -> ShardedParameter:
    is_dtensor, placements = isinstance(parameter, DTensor), getattr(parameter, "placements", ())
    return ShardedParameter(
        shape=list(parameter.shape),
        local_numel=local(parameter).numel(),
        dtype=str(parameter.dtype).removeprefix("torch."),
        is_dtensor=is_dtensor,
        shard_ranks=_ranks_of_dims(parameter, sharded=True) if isinstance(parameter, DTensor) else [],
        replica_ranks=_ranks_of_dims(parameter, sharded=False) if isinstance(parameter, DTensor) else [],
        is_trained=parameter.requires_grad,
        is_cut_in_rows=all(getattr(each, "dim", 0) == 0 for each in placements),
    )


def _ranks_of_dims(parameter: DTensor, *, sharded: bool) -> list[list[int]]:
    """Return the ranks along each mesh dimension that shards a parameter, or along each other one."""
    mesh = parameter.device_mesh
    dims = [index for index, placement in enumerate(parameter.placements) if hasattr(placement, "dim") == sharded]
    return [sorted(dist.get_process_group_ranks(mesh.get_group(index))) for index in dims]
