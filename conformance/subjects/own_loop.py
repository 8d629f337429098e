"""Subjects made of an owner's own loop: a function of a `LoopConfig` that trains as the owner does.

The suite finds the model, the optimizer and the moments of each step by itself, see `moments`.
"""

import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from conformance.subjects.cells import Accumulation, MeshName, Precision, SubjectCell
from conformance.subjects.data import default_count
from conformance.subjects.decorated import ParallelConfig, configured, require_declarable, sgd
from conformance.subjects.feeding import Feed, Loader, RunIsOver, require_other_data
from conformance.subjects.finding import ModelSearch, require_same_optimizers
from conformance.subjects.loop import scalar
from conformance.subjects.moments import Count, Moments
from conformance.subjects.one_process import made_on
from conformance.subjects.optimizers import MakeOptimizer, made, members
from conformance.subjects.packages import versions_of
from conformance.subjects.protocol import Batch, StepObserver, SubjectMistake
from conformance.subjects.reference import SEED, aliases
from conformance.subjects.turns import turn_of, turns_of

Processes = Literal["shared", "fresh"]
Loss = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True, kw_only=True)
class LoopConfig(ParallelConfig):
    """Configuration in which an owner's loop is asked to train."""

    max_norm: float
    """Limit to which gradients must be clipped."""
    accumulation: int
    """Most micro-batches of a step on each rank."""
    device: torch.device
    """Device on which this rank computes."""
    shape: Mapping[str, int]
    """Ranks by dimension of the mesh, the outermost first: `dp_replicate`, `dp_shard` and `tp`, of those there are."""
    data_rank: int
    """Index of this rank among those that get different data: ranks are numbered with `tp` as the innermost."""
    load_from: Path | None = None
    """Directory from which the loop must resume, or None."""
    save_to: Path | None = None
    """Directory in which the loop must save model and optimizer when it has taken all steps, or None."""
    _feed: Feed
    _make_model: Callable[[], nn.Module]
    _make_optimizer: MakeOptimizer

    def model(self) -> nn.Module:
        """Return the model of `model=`, with the initial weights of one process, or on the meta device.

        A loop that makes its model in another way is judged, too, but for its initial weights.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self._make_model()

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Any:
        """Return the optimizer, or the list of optimizers, of `optimizer=`."""
        return self._make_optimizer(parameters)

    def device_mesh(self, **names: str) -> DeviceMesh:
        """Return a mesh of all ranks; `names` are names for its dimensions, by the suite's."""
        named = tuple(names.get(name, name) for name in self.shape)
        return init_device_mesh(self.device.type, tuple(self.shape.values()), mesh_dim_names=named)

    @property
    def steps(self) -> Iterator[list[Batch]]:
        """Micro-batches of each step on this rank, on the host."""
        return self._feed.steps()

    @property
    def joined_steps(self) -> Iterator[Batch]:
        """Micro-batches of each step as one batch, for a trainer that splits it itself."""
        return self._feed.joined()

    @property
    def loader(self) -> Loader:
        """All micro-batches, to be read once like a `DataLoader`, for a loop that groups them itself."""
        return self._feed.loader()

    def next_batch(self, *_unused: Any) -> Batch:
        """Return the next micro-batch, for a loop that calls a function for it; ends the run after the last one."""
        return self._feed.next_batch()


@dataclass(frozen=True)
class LoopSubject:
    """Subject whose loop is the owner's, see `protocol.Subject`."""

    function: Callable[[LoopConfig], Any]
    make_model: Callable[[], nn.Module]
    make_tied_model: Callable[[], nn.Module] | None
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[torch.Generator], Batch]
    count: Callable[[Batch], float]
    optimizer: MakeOptimizer
    scheduler: Callable[[Optimizer], Any] | None
    max_norm: float | None
    meshes: Sequence[MeshName]
    precisions: Sequence[Precision]
    meta: bool
    offloads: bool
    resumes: bool
    accumulation: Accumulation
    processes: Processes
    packages: Sequence[str]
    refuses: Callable[[SubjectCell], str | None]
    shims: Sequence[str] = field(default=())
    divides_losses: ClassVar[bool] = True
    """True, always: the owner's code divides losses by counts, and the suite's does not."""
    turns: Mapping[str, "LoopSubject"] = field(default_factory=dict)
    """Subjects with one loss and one optimizer each, by the module that these train; empty if all is trained at once.
    """

    @property
    def name(self) -> str:
        """Name of the function, with its module."""
        return f"{self.function.__module__}:{self.function.__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, as if it were not decorated."""
        return self.function(*args, **kwargs)

    def versions(self) -> Mapping[str, str]:
        """Return the versions of torch, of the packages that the functions name, and of those that are declared."""
        return versions_of((self.function, self.make_model, self.loss, self.optimizer), packages=self.packages)

    def unsupported(self, cell: SubjectCell) -> str | None:
        """Return the author's reason, or the declaration that a cell needs and the decorator lacks, or None."""
        if reason := self.refuses(cell):
            return reason
        if cell.mesh not in self.meshes:
            return f"this subject does not declare meshes=[..., {cell.mesh!r}]"
        if cell.precision not in self.precisions:
            return f"this subject does not declare precisions=[..., {cell.precision!r}]"
        if cell.init == "meta" and not self.meta:
            return "this subject does not declare meta=True"
        if cell.tied and self.make_tied_model is None:
            return "this subject does not declare tied_model=, a function that makes the model with tied weights"
        if cell.offload and not self.offloads:
            return "this subject does not declare offload=True"
        if cell.resumed and not self.resumes:
            return "this subject does not declare resumes=True"
        if max(cell.accumulation) > 1 and self.accumulation == "none":
            return "this subject declares accumulation='none'"
        return None

    def model(self, *, tied: bool) -> nn.Module:
        """Return the owner's model."""
        return self.make_tied_model() if tied and self.make_tied_model else self.make_model()

    def make_optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return the optimizer of the reference, whose schedule goes on with each step."""
        optimizer = made(self.optimizer, parameters)
        for each in members(optimizer):
            if self.scheduler is not None:
                schedule = self.scheduler(each)
                each.register_step_post_hook(lambda *_unused, schedule=schedule: schedule.step())
        return optimizer

    def build(self, cell: SubjectCell, *, device: torch.device, max_norm: float) -> "OwnLoopRun":
        """Prepare the run; the loop itself makes model and optimizer when it trains."""
        return OwnLoopRun(self, cell, device, max_norm)


class OwnLoopRun:
    """One rank that trains by the owner's loop: a `SelfShardingRun` that is `Resumable`."""

    shards_in_train = True

    def __init__(self, subject: LoopSubject, cell: SubjectCell, device: torch.device, max_norm: float) -> None:
        self.data_rank = dist.get_rank() // cell.shape.get("tp", 1)
        self.dataset_bytes = 0
        self.model: nn.Module = nn.Module()
        self.optimizer: Optimizer = sgd([nn.Parameter(torch.zeros(1))])  # both until the loop has made its own
        self.norms: list[float] = []
        """Norm of each step's gradients as the loop tells it; empty if it tells none."""
        self.learning_rates: list[list[float]] = []
        """Learning rates with which the optimizers of each step have stepped, by group of parameters."""
        self.makes_own_model = True
        """False if the loop has asked for the model of `model=`, whose initial weights are known."""
        self.scale_in_clipping = 1.0
        """Factor by which a `GradScaler` had scaled the gradients that were clipped."""
        self.out_of_turn: list[str] = []
        """Sentences about optimizers that have stepped, or gradients that were clipped, in the turn of others."""
        self._subject, self._cell, self._device, self._max_norm = subject, cell, device, max_norm
        self._turns = turns_of(subject)
        self._own_model: nn.Module | None = None
        """Model that the loop has been given; the suite finds it although the loop calls its parts alone."""
        self._names = _names_of(subject, cell)
        self._load_from: Path | None = None
        self._own = tempfile.TemporaryDirectory()
        self._saved = Path(self._own.name)
        self._observer: StepObserver | None = None

    def save(self, directory: Path) -> None:
        """Take the files that the loop has saved; raises SubjectMistake if there are none."""
        if dist.get_rank() == 0:
            if not any(self._saved.iterdir()):
                raise SubjectMistake(
                    "the loop left nothing in config.save_to: save model and optimizer there at its end"
                )
            shutil.copytree(self._saved, directory, dirs_exist_ok=True)

    def load(self, directory: Path) -> None:
        """Let the loop resume from a directory."""
        self._load_from = directory

    def found(self, by_turn: Sequence[Sequence[Optimizer]]) -> None:
        """Tell the observer that the model is there; `by_turn` are the optimizers that step in each turn.

        Raises SubjectMistake for others than are declared. Of a run that goes on laws judge what was loaded.
        """
        assert self._observer is not None, "the loop does not run"
        self._own_model = None  # of which a loop may have used the weights alone, for a model of its own
        if self._load_from is None:
            expected = _optimizers_of(self._subject, self._cell)
            require_same_optimizers(by_turn, expected, rank=dist.get_rank())
        self._observer.built()

    def train(self, steps: Sequence[Sequence[Batch]], observer: StepObserver) -> list[float]:
        """Train on the micro-batches of each step; returns the losses that the loop tells, or an empty list.

        Ranks that see different data draw different random numbers, as in a process that nobody has seeded.
        """
        self._observer = observer
        torch.manual_seed(SEED + self.data_rank)
        feed = Feed(steps[:: len(self._turns)], data_rank=self.data_rank, data_ranks=self._cell.data_ranks)
        moments = Moments(
            self,
            observer,
            ModelSearch(*self._names),
            turns=self._turns,
            first=self._cell.saved_after if self._load_from else 0,
            accumulation=[len(micro_batches) for micro_batches in steps],
            max_norm=self._max_norm,
            ended=partial(_require_grouping, feed),
        )
        told: list[Any] = []
        with ExitStack() as stack:
            config = self._config(feed)
            stack.enter_context(_left_without_data())
            stack.enter_context(patch.object(sys, "argv", sys.argv[:1]))  # the loop's arguments are not the suite's
            stack.enter_context(feed.in_place_of_loaders())
            stack.enter_context(moments.watched())
            _collect(self._subject.function(config), told)
        moments.require_all_steps()
        self._require_other_data(feed)
        self.dataset_bytes = feed.dataset_bytes
        return self._losses(told, len(steps))

    def _require_other_data(self, feed: Feed) -> None:
        """Raise SubjectMistake for loaders whose own data, which the suite's replaces, are those of other ranks."""
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, (self.data_rank, feed.own_data))
        require_other_data(found)

    def _save_to(self) -> Path | None:
        """Return a directory that all ranks share for a run that must be saved, or None."""
        if not self._cell.resumed or self._load_from is not None:
            return None
        shared = [self._own.name]
        dist.broadcast_object_list(shared)
        self._saved = Path(shared[0])
        return self._saved

    def _config(self, feed: Feed) -> LoopConfig:
        return LoopConfig(
            **asdict(configured(self._cell)),
            max_norm=self._max_norm,
            accumulation=max(self._cell.accumulation),
            device=self._device,
            shape=self._cell.shape,
            data_rank=self.data_rank,
            load_from=self._load_from,
            save_to=self._save_to(),
            _feed=feed,
            _make_model=self._make_model,
            _make_optimizer=self._subject.optimizer,
        )

    def _make_model(self) -> nn.Module:
        self.makes_own_model = False
        make = partial(self._subject.model, tied=self._cell.tied)
        self._own_model = made_on(self._device, make, on_meta=self._cell.init == "meta")
        return self._own_model

    def is_trained(self, name: str, step: int) -> bool:
        """Return whether the optimizer that steps in a step of the run has a parameter."""
        return turn_of(self._subject, step).trains(name)

    def _losses(self, told: Sequence[Any], steps: int) -> list[float]:
        """Return the losses that the loop has told, and keep the norms."""
        pairs = [_loss_and_norm(entry) for entry in told]
        losses = [loss for loss, _ in pairs if loss is not None]
        norms = [norm for _, norm in pairs if norm is not None]
        for name, numbers in (("losses", losses), ("norms", norms)):
            if numbers and len(numbers) != steps:
                raise SubjectMistake(
                    f"the loop tells {len(numbers)} {name} in {steps} steps: one for each step, or none"
                )
        self.norms += norms
        return losses


def own_loop(
    *,
    model: Callable[[], nn.Module],
    loss: Loss | Mapping[str, Loss],
    batch: Callable[[torch.Generator], Batch],
    count: Callable[[Batch], float] = default_count,
    optimizer: MakeOptimizer | Mapping[str, MakeOptimizer] = sgd,
    scheduler: Callable[[Optimizer], Any] | None = None,
    max_norm: float | None = None,
    meshes: Sequence[MeshName] = ("dp2",),
    precisions: Sequence[Precision] = ("fp32",),
    tied_model: Callable[[], nn.Module] | None = None,
    meta: bool = False,
    offload: bool = False,
    resumes: bool = False,
    accumulation: Accumulation = "any",
    processes: Processes = "shared",
    packages: Sequence[str] = (),
    refuses: Callable[[SubjectCell], str | None] = lambda _cell: None,
    shims: Sequence[str] = (),
) -> Callable[[Callable[[LoopConfig], Any]], LoopSubject]:
    """Make a subject of `train(config)`, which trains by the owner's own code, for `conformance judge MODULE:train`.

    The function makes model and optimizer, and trains on the micro-batches of `config` (`LoopConfig`): of
    `config.steps`, or those that its own `DataLoader` yields, in place of whose data the suite puts its own. It yields,
    or returns a list of, what it logs in each step: a loss, `(loss, norm)`, or a mapping with `loss` and `grad_norm`;
    if it tells none, losses are not judged; one rank may tell them alone. It calls nothing of the suite. All ranks have
    a default process group: `init_process_group` does nothing there. Gradients are judged as they are after the last
    backward pass of a step. A loop that changes them later, as by a division, takes their norm with torch's functions,
    which show when they are done: `get_total_norm`, `clip_grad_norm_` or `GradScaler.unscale_`.

    Args:
        model: makes the model that one process trains, in fp32 and without dropout; a class will do.
        loss: function of model and batch that returns the sum of the losses of samples or tokens, a scalar: what one
            process minimises is this sum over all ranks, divided by `count`. Where optimizers take turns, as in a GAN,
            a mapping: each loss by the name of the module that it trains, in the order in which their optimizers step.
        batch: function of a `torch.Generator` that returns a micro-batch as the loop gets it: a tensor, or a dict, list
            or tuple of tensors, whose dimension 0 is the samples.
        count: number by which a batch counts in the mean; by default its labels other than -100, or its samples: labels
            are the integers below the key `labels`, or those of the second of two tensors.
        optimizer: makes the optimizer that the loop makes, for the reference; or a list of those that step together, as
            of matrices and of other parameters. A mapping by module if those that take turns differ.
        scheduler: makes the schedule of learning rates of an optimizer. The reference steps the schedule once, right
            after each step of the optimizer, as the loop must: the schedule of an epoch is not judged.
        max_norm: limit to which the loop clips gradients; by default it must take `config.max_norm`. `math.inf` if it
            clips none.
        meshes: those that the loop can have, of `dp2`, `hsdp2x2` and `dp2-tp2`.
        precisions: those that the loop can have, of `fp32` and `bf16`.
        tied_model: makes the model with its embedding and its head as one parameter; `config.model()` returns it.
        meta: True if the loop shards a model on the meta device, as `config.model()` returns it, and initialises it.
        offload: True if the loop gives `config.offload_policy` to `fully_shard`.
        resumes: True if the loop loads from `config.load_from`, and saves to `config.save_to` at its end.
        accumulation: micro-batches that the loop can accumulate in a step: `any` number, an `even` one, that is, the
            same `config.accumulation` in all steps, `remainder`, that is, those and fewer in the last step, for which
            no more are left, or `none`.
        processes: `fresh` if the trainer leaves something in a process that another run cannot have.
        packages: installed packages whose versions the report shows beside those that the functions name.
        refuses: returns why the trainer cannot run a cell that is declared, for the report, or None.
        shims: private names that were touched to make the trainer run here.

    Raises SubjectMistake, a UsageError, for arguments that cannot be used.
    """
    losses = loss if isinstance(loss, Mapping) else {"": loss}
    optimizers = optimizer if isinstance(optimizer, Mapping) else dict.fromkeys(losses, optimizer)
    if losses.keys() != optimizers.keys():
        raise SubjectMistake(f"{[*losses]} in loss=, and {[*optimizers]} in optimizer=: give both for the same modules")
    for each in losses.values():
        require_declarable(meshes=meshes, precisions=precisions, model=model, loss=each, batch=batch, count=count)
    for name, value, allowed in (
        ("accumulation", accumulation, get_args(Accumulation)),
        ("processes", processes, get_args(Processes)),
    ):
        if value not in allowed:
            raise SubjectMistake(f"{name}={value!r}: give {' or '.join(map(repr, allowed))}")

    def declare(function: Callable[[LoopConfig], Any]) -> LoopSubject:
        one = LoopSubject(
            function=function,
            make_model=model,
            make_tied_model=tied_model,
            loss=next(iter(losses.values())),
            batch=batch,
            count=count,
            optimizer=next(iter(optimizers.values())),
            scheduler=scheduler,
            max_norm=max_norm,
            meshes=tuple(meshes),
            precisions=tuple(precisions),
            meta=meta,
            offloads=offload,
            resumes=resumes,
            accumulation=accumulation,
            processes=processes,
            packages=tuple(packages),
            refuses=refuses,
            shims=tuple(shims),
        )
        if "" in losses:
            return one
        turns = {name: replace(one, loss=each, optimizer=optimizers[name]) for name, each in losses.items()}
        return replace(one, turns=turns)

    return declare


def _names_of(subject: LoopSubject, cell: SubjectCell) -> tuple[list[str], list[str]]:
    """Return the names of the parameters of the model of one process, and the other names of those that are tied."""
    model = _model_of(subject, cell)
    return [name for name, _ in model.named_parameters()], [*aliases(model)]


def _optimizers_of(subject: LoopSubject, cell: SubjectCell) -> list[Optimizer]:
    """Return the optimizer of each turn of the reference, of parameters without numbers."""
    trained = [(name, each) for name, each in _model_of(subject, cell).named_parameters() if each.requires_grad]
    empty = {name: nn.Parameter(torch.empty_like(each, device="meta")) for name, each in trained}
    return [
        turn.subject.make_optimizer([each for name, each in empty.items() if turn.trains(name)])
        for turn in turns_of(subject)
    ]


def _model_of(subject: LoopSubject, cell: SubjectCell) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        return subject.model(tied=cell.tied)


@contextmanager
def _left_without_data() -> Iterator[None]:
    """Open a context that ends in good order if a loop asks for data when there is no more."""
    try:
        with suppress(RunIsOver, StopIteration):
            yield
    except RuntimeError as error:
        if not isinstance(error.__cause__, StopIteration):  # which Python makes of one that leaves a generator
            raise


def _collect(returned: Any, told: list[Any]) -> None:
    """Add the entries that a loop yields or returns in a list, also if it is left in between."""
    if isinstance(returned, Iterator):
        for entry in returned:
            told.append(entry)
    elif isinstance(returned, list | tuple):
        told += returned


def _loss_and_norm(entry: Any) -> tuple[float | None, float | None]:
    """Return loss and norm of gradients that a loop has told of a step, each None if it is left out."""
    if isinstance(entry, Mapping):
        entry = (entry.get("loss"), entry.get("grad_norm"))
    loss, norm = entry if isinstance(entry, tuple) and len(entry) == 2 else (entry, None)
    return _number(loss), _number(norm)


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, float | int):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return scalar(value)
    raise SubjectMistake(
        f"the loop tells a {type(value).__name__}: yield the loss of a step, (loss, norm) or "
        "{'loss': ..., 'grad_norm': ...}, or nothing"
    )


def _require_grouping(feed: Feed, count: Count, expected: int) -> None:
    """Raise SubjectMistake for a step that a loop with a loader has taken after other micro-batches than expected."""
    if feed.is_one_by_one and not count.agrees_with(expected):
        raise SubjectMistake(
            f"the loop took a step after {count.micro_batches} micro-batches, and this cell has {expected}: let it "
            "accumulate config.accumulation of them, and declare accumulation='even', or 'remainder' if it takes a "
            "step with what is left at the end; with accumulation='none' it takes a step after each micro-batch"
        )
