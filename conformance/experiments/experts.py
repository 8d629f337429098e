"""Experts in one training step: the choice of the routers, the balance loss, and the exchange of rows between ranks."""

from collections.abc import Callable, Mapping
from functools import partial

import msgspec
import torch
from torch import Tensor

from conformance.experiments.context import RankWorld, experiment
from conformance.run.experiment import Needs
from reference_trainer.experts import MixtureOfExperts, Router, Routes
from reference_trainer.model import Transformer
from reference_trainer.observer import Observer


class Routing(msgspec.Struct):
    """Choice of a router in one forward, of the tokens of one rank."""

    load: list[int]
    """Number of tokens by expert."""
    probability: list[float]
    """Sum of the probabilities by expert, added up in fp64."""
    balance_loss: float = 0.0
    """Balance loss, summed over the tokens of the rank."""
    deviation: float = 0.0
    """Largest difference of the logarithm of a probability from that in fp64."""
    overlooked: float = 0.0
    """Largest difference in fp64 of the logarithms of the probabilities of an expert that was not chosen for a token,
    and of one that was; negative if the most probable experts were chosen."""
    logit_size: float = 0.0
    """Largest sum of the sizes of the terms of a logit."""


@experiment(needs=Needs.TRAINING)
def routing(rank: RankWorld) -> list[Routing]:
    """Train one step, and return the choice of each block's router, micro-batch by micro-batch."""
    watch = _Watch()
    rank.trainer(watch).train_step(0)
    return watch.routings


class _Watch(Observer):
    """Observer of the routers of a model."""

    def __init__(self) -> None:
        self.routings: list[Routing] = []
        self._mixtures: list[MixtureOfExperts] = []
        self._phase = ""

    def initialized(self, model: Transformer) -> None:
        """Hook each router; a hook sees the weight that FSDP has gathered."""
        self._mixtures = model.mixtures
        for mixture in self._mixtures:
            mixture.router.register_forward_hook(self._note)

    def phase(self, name: str, *, step: int) -> None:
        """Read the balance losses when forward has ended; recomputed and evaluated ones are not noted."""
        if self._phase == "forward":
            for routed, mixture in zip(self.routings[-len(self._mixtures) :], self._mixtures, strict=True):
                assert mixture.balance_loss is not None
                routed.balance_loss = float(mixture.balance_loss.detach())
        self._phase = name

    @torch.no_grad()
    def _note(self, router: Router, inputs: tuple[Tensor, ...], routes: Routes) -> None:
        if self._phase != "forward":
            return
        x, weight = inputs[0].double(), router.local(router.weight).double()
        exact = (x @ weight.T).log_softmax(-1)
        self.routings.append(
            Routing(
                load=routes.experts.flatten().bincount(minlength=weight.shape[0]).tolist(),
                probability=routes.probabilities.double().sum(0).tolist(),
                deviation=float((routes.probabilities.double().log() - exact).abs().max()),
                overlooked=_overlooked(exact, routes.experts),
                logit_size=float((x.abs() @ weight.abs().T).max()),
            )
        )


def _overlooked(probabilities: Tensor, chosen: Tensor) -> float:
    """Largest advantage of an expert that was not chosen; both have shape (tokens, experts)."""
    others = probabilities.scatter(-1, chosen, float("-inf")).amax(-1)
    return float((others - probabilities.gather(-1, chosen).amin(-1)).max())


class Exchange(msgspec.Struct):
    """Rows of one rank that experts of all ranks have computed."""

    rows: int
    arrived: int
    """Number of rows, of all ranks, that the experts of this rank computed."""
    wrong: int
    """Number of rows whose result is not that of their expert."""
    wrong_gradients: int
    """Number of rows whose gradient is not that of their result."""


_ROWS = 24
_Choice = Callable[[int, int], Tensor]
"""Function of the rank and the number of experts that returns the expert of each row, in rising order."""
_CHOICES: Mapping[str, _Choice] = {
    "evenly": lambda _rank, experts: torch.arange(_ROWS) * experts // _ROWS,
    "to the first expert": lambda _rank, _experts: torch.zeros(_ROWS, dtype=torch.int64),
    "to the last expert": lambda _rank, experts: torch.full((_ROWS,), experts - 1),
    "to an expert for each rank": lambda rank, experts: torch.full((_ROWS,), rank % experts),
    "none by the first rank": lambda rank, experts: (torch.arange(_ROWS * (rank > 0)) * 7 % experts).sort().values,
    "by chance": lambda rank, experts: _random(experts, (_ROWS + rank,), seed=rank).sort().values,
}


@experiment(needs=Needs.TRAINING)
def exchange_rows(rank: RankWorld) -> dict[str, Exchange]:
    """Let experts that multiply by their number compute rows of whole numbers, by the rule that chooses experts."""
    mixture, experts = rank.trainer().model.mixtures[0], rank.config.model.n_experts
    first_held = rank.dims.shard_rank(rank.rank) % rank.dims.ep * experts // rank.dims.ep
    outcomes = {}
    for name, choose in _CHOICES.items():
        chosen = choose(rank.rank, experts).to(rank.device)
        numbers = torch.arange(len(chosen), dtype=torch.float32, device=rank.device) + rank.rank * 1000
        rows = numbers.unsqueeze(1).expand(-1, rank.config.model.dim).clone().requires_grad_()
        arrived: list[int] = []
        multiply = partial(_multiply, first_held, arrived)
        results = mixture.dispatch(multiply, rows, chosen.bincount(minlength=experts))
        (gradient,) = torch.autograd.grad((results * (numbers + 1).unsqueeze(1)).sum(), rows)
        factor = (chosen + 1).float()
        outcomes[name] = Exchange(
            rows=len(chosen),
            arrived=sum(arrived),
            wrong=_differing(results, numbers * factor),
            wrong_gradients=_differing(gradient, (numbers + 1) * factor),
        )
    return outcomes


def _multiply(first: int, arrived: list[int], rows: Tensor, counts: Tensor) -> Tensor:
    """Multiply rows by the number of their expert, from 1 on; `counts` are those of the experts from `first` on."""
    arrived.append(len(rows))
    experts = torch.arange(first, first + len(counts), device=rows.device).repeat_interleave(counts)
    return rows * (experts + 1).unsqueeze(1)


def _differing(measured: Tensor, expected: Tensor) -> int:
    return int((measured != expected.unsqueeze(1)).any(1).sum())


def _random(experts: int, shape: tuple[int, ...], *, seed: int) -> Tensor:
    return torch.randint(experts, shape, generator=torch.Generator().manual_seed(seed))
