"""Recorder: all instruments of one rank's training run, and their facts."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from conformance.instruments.capture import Capture, ModelInputs
from conformance.instruments.collectives import CollectiveLog
from conformance.instruments.compilation import Compilation
from conformance.instruments.device_memory import expandable_segments
from conformance.instruments.dispatch_tap import DispatchTap, UntracedTap
from conformance.instruments.dropout_masks import DropoutMasks
from conformance.instruments.dtypes import DtypeAudit
from conformance.instruments.events import Events
from conformance.instruments.expert_choices import ExpertChoices
from conformance.instruments.facts import OptimizerGroup, ParameterFacts, RankFacts, StepFacts
from conformance.instruments.fsdp_state import backward_prefetch_of, gradient_divisors_of, offloading_of
from conformance.instruments.operators import Operands, OperatorCount
from conformance.instruments.pipeline_log import PipelineLog
from conformance.instruments.poison import Poison
from conformance.instruments.sharding import Residency, fsdp_group_of, sharded_parameters, shared_parameters
from conformance.instruments.streams import TracedStep
from conformance.instruments.taps import Taps
from conformance.instruments.timing import StepProfile, StepTimes, calibration_s
from reference_trainer.fsdp1 import FSDP1Model, summon_full_params
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer, Phase, StageAction
from reference_trainer.train import StepMetrics, Trainer


class Recorder(Observer):
    """Observer of a trainer that passes each event to every instrument, and collects their facts."""

    def __init__(
        self,
        *,
        rank: int,
        variables: dict[str, str | None],
        profiled_step: int | None = None,
        streams: TracedStep | None = None,
        tapped: bool = False,
        compiled: type[nn.Module] | None = None,
    ) -> None:
        """Make the instruments; `tapped` adds `taps`, which keep the tensors at the borders of all modules.

        Modules of the class `compiled` compute in graphs, into which no tap can look.
        """
        self._rank, self._variables = rank, variables
        self._parameters: dict[str, ParameterFacts] = {}
        self._shared: dict[str, list[list[str]]] = {}
        self._sharded_parameters: dict[str, Tensor] = {}
        self._reshard: dict[str, bool | int] = {}
        self._checkpoint: tuple[str | None, str | None] = (None, None)
        self._collectives, self._dtypes = CollectiveLog(), DtypeAudit()
        self._residency, self._poison = Residency(), Poison()
        self._operators, self._operands, self._compilation = OperatorCount(), Operands(), Compilation()
        self._capture, self._model_inputs, self._dropout = Capture(), ModelInputs(), DropoutMasks()
        self._choices = ExpertChoices()
        self._pipeline = PipelineLog(self._collectives.count)
        self._events, self._times, self._profile = Events(), StepTimes(), StepProfile(profiled_step)
        self._instruments: tuple[Observer, ...] = (
            self._events,
            self._collectives,
            self._residency,
            self._poison,
            self._dtypes,
            self._operators,
            self._operands,
            self._compilation,
            self._capture,
            self._model_inputs,
            self._pipeline,
            self._times,
        )
        self._streams = streams
        if streams:
            self._instruments += (streams,)
        self.taps: Taps | None = None
        if tapped:
            self.taps = Taps(
                is_opaque=lambda module: compiled is not None and isinstance(module, compiled),
                quietly=lambda: self._tap.deaf(),
                count_collectives=self._collectives.count,
            )
            self._instruments += (self.taps,)
        # Last: these wait for the device when a step is over for all others.
        self._instruments += (self._choices, self._dropout)
        listeners = [
            self._collectives.listen,
            self._dtypes.listen,
            self._operators.listen,
            self._operands.listen,
            self._dropout.listen,
            self._pipeline.listen,
            *([self.taps.listen] if self.taps else []),
        ]
        outcomes = [self._dropout.listen_to_outcomes, *([streams.listen] if streams else [])]
        outcomes += [self.taps.listen_to_outcomes] if self.taps else []
        # FSDP's hooks break the graph of a model.
        self._tap = (UntracedTap if compiled is Transformer else DispatchTap)(listeners, outcomes=outcomes)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Open the context in which the run must take place."""
        with self._streams.installed() if self._streams else nullcontext(), self._tap:
            yield

    def phase(self, name: Phase, *, step: int) -> None:
        """Pass the phase that begins to every instrument."""
        if name == "data":
            self._profile.begin(step)
        for instrument in self._instruments:
            instrument.phase(name, step=step)
        if name == "idle":
            self._profile.end(step)

    def reshard_policy(self, after_forward: dict[str, bool | int]) -> None:
        """Keep the arguments of `fully_shard`."""
        self._reshard = after_forward

    def sharded(self, model: Transformer) -> None:
        """Keep the layouts of the parameters, and pass the model to every instrument."""
        with self._tap.paused(), summon_full_params(model):
            groups = fsdp_group_of(model)
            self._parameters = {name: _parameter_facts(p, groups[name]) for name, p in model.named_parameters()}
        self._notify("sharded", model)

    def materialized(self, model: Transformer) -> None:
        """Pass the materialised model to every instrument."""
        self._notify("materialized", model)

    def loaded(self, path: str, form: str) -> None:
        """Keep the path and the format of the checkpoint."""
        self._checkpoint = path, form

    def resumed(self, model: Transformer, optimizer: torch.optim.Optimizer) -> None:
        """Pass the restored state of a checkpoint to every instrument."""
        self._notify("resumed", model, optimizer)

    def initialized(self, model: Transformer) -> None:
        """Keep the names of shared parameters, and pass the model to every instrument."""
        self._shared["initialized"] = shared_parameters(model)
        self._sharded_parameters = sharded_parameters(model)
        self._notify("initialized", model)

    def batch(self, micro_batches: list[tuple[Tensor, Tensor]], *, step: int) -> None:
        """Pass the batch to every instrument."""
        self._notify("batch", micro_batches, step=step)

    def stage_action(self, action: StageAction, *, stage: int, micro_batch: int, step: int) -> None:
        """Pass the action to the log of the pipeline and the taps: no other instrument may keep activations alive."""
        if self.taps is not None:
            self.taps.stage_action(action, stage=stage, micro_batch=micro_batch, step=step)
        self._pipeline.stage_action(action, stage=stage, micro_batch=micro_batch, step=step)

    def gradients(self, model: Transformer, *, step: int) -> None:
        """Pass the reduced and unscaled gradients to every instrument."""
        self._notify("gradients", model, step=step)

    def clipped(self, model: Transformer, *, norm: Tensor, step: int) -> None:
        """Pass the clipped gradients to every instrument."""
        self._notify("clipped", model, norm=norm, step=step)

    def keep_state(self, trainer: Trainer, *, step: int) -> None:
        """Keep the optimizer's state after a step, under the keys `afterN/KIND/NAME`."""
        with self._tap.paused(), torch.no_grad(), summon_full_params(trainer.model):
            # A group may be unsharded meanwhile, and shows others. FSDP1 makes new parameters each time.
            is_fsdp1 = isinstance(trainer.model, FSDP1Model)
            parameters = sharded_parameters(trainer.model) if is_fsdp1 else self._sharded_parameters
            self._capture.after_step(parameters, trainer.optimizer, step=step)

    def missing(self, steps: Sequence[int], metrics: Sequence[object]) -> list[str]:
        """Return the events of these steps that the trainer has not reported; `finish` needs all of them."""
        silent = [step for step, reported in zip(steps, metrics, strict=True) if not isinstance(reported, StepMetrics)]
        return [*self._events.missing(steps), *(f"metrics of step {step}" for step in silent)]

    def finish(self, trainer: Trainer, metrics: list[StepMetrics]) -> tuple[RankFacts, dict[str, Tensor]]:
        """Capture the final state; returns the facts of this rank, and its tensors by the keys of its instruments."""
        # The work of instruments does not belong to the run.
        with self._tap.paused(), torch.no_grad(), summon_full_params(trainer.model):
            self._capture.final(trainer.model, trainer.optimizer)
            self._dtypes.final(trainer.model, trainer.optimizer)
        facts = RankFacts(
            rank=self._rank,
            variables=self._variables,
            expandable_segments=expandable_segments(trainer.device),
            mesh_coordinate={name: trainer.mesh.get_local_rank(name) for name in trainer.mesh.mesh_dim_names or ()},
            steps=[StepFacts(**asdict(step)) for step in metrics],
            step_s=self._times.step_s,
            calibration_s=calibration_s(trainer.device),
            communication=self._profile.communication,
            parameters=self._parameters,
            collectives=self._collectives.facts(trainer.mesh),
            reshard_after_forward=self._reshard,
            backward_prefetch=backward_prefetch_of(trainer.model),
            unsharded=self._residency.unsharded,
            dtypes=self._dtypes.facts(),
            rope_tables=self._dtypes.rope_tables(),
            places=self._dtypes.places(),
            gradient_divisors=gradient_divisors_of(trainer.model),
            offloading=offloading_of(trainer.model),
            optimizer_groups=_optimizer_groups(trainer.model, trainer.optimizer),
            operators=self._operators.facts(),
            operands=sorted(self._operands.noted),
            blocks=self._compilation.facts(),
            checkpoint=self._checkpoint[0],
            checkpoint_format=self._checkpoint[1],
            poisoned=self._poison.poisoned,
            materialized=self._poison.materialized_at_once,
            noticed_poison=self._poison.noticed,
            shared_parameters=self._shared | {"final": shared_parameters(trainer.model)},
            surviving_poison=self._poison.surviving,
            fingerprints=self._capture.fingerprints,
            layouts=self._capture.layouts,
            batches=self._capture.batches,
            model_inputs=self._model_inputs.digests,
            stage_actions=self._pipeline.actions,
            transfers=self._pipeline.transfers,
            streams=self._streams.facts() if self._streams else None,
        )
        return facts, self._capture.tensors | self._dropout.tensors | self._choices.tensors

    def _notify(self, event: str, *args: Any, **kwargs: Any) -> None:
        # The work of instruments does not belong to the run, and autograd need not know of it. FSDP1's parameters are
        # shown unsharded.
        with (
            self._tap.paused(),
            self._times.excluded(),
            self._profile.excluded(),
            torch.no_grad(),
            summon_full_params(args[0]),
        ):
            for instrument in self._instruments:
                getattr(instrument, event)(*args, **kwargs)


def _parameter_facts(parameter: torch.Tensor, group: str) -> ParameterFacts:
    if not isinstance(parameter, DTensor):
        return ParameterFacts(group, list(parameter.shape), {})
    names = parameter.device_mesh.mesh_dim_names or ()
    # A layout that does not fit its mesh is for laws to judge, not for an instrument to fail on.
    by_name = zip_longest(names, parameter.placements, fillvalue="?")
    shard_dims = {name: placement.dim for name, placement in by_name if hasattr(placement, "dim")}
    return ParameterFacts(group, list(parameter.shape), shard_dims)


def _optimizer_groups(model: Transformer, optimizer: torch.optim.Optimizer) -> list[OptimizerGroup]:
    names = {id(p): name for name, p in sharded_parameters(model).items()}
    return [
        OptimizerGroup(
            weight_decay=group["weight_decay"],
            lr=float(group["lr"]),
            parameters=[names.get(id(p), "?") for p in group["params"]],
            steps=sorted({float(optimizer.state[p]["step"]) for p in group["params"] if "step" in optimizer.state[p]}),
        )
        for group in optimizer.param_groups
    ]
