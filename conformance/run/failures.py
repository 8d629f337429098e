"""Failed runs: how each rank ended, and which rank failed first."""

import re
import signal
from collections.abc import Iterable, Sequence
from typing import Literal

from conformance.run.ranks.messages import RankReport

FailureKind = Literal["raised", "crash", "timeout"]

# Errors of gloo, NCCL and the stores in a rank whose peer is gone.
PEER_LOSS_TYPES = frozenset({"DistNetworkError", "DistStoreError"})
PEER_LOSS_MESSAGE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|lost)|broken pipe|by peer|remote (process|peer)"
    r"|(socket|wait|recv|read|operation|rendezvous).{0,40}time(d )?out|timed out (waiting|after)"
    r"|ncclRemoteError|ncclSystemError|failed to recv|connectFullMesh failed",
    re.IGNORECASE,
)
# A thread waits for its peers if one of its innermost frames belongs to torch.distributed; deeper frames prove
# nothing, because FSDP2 calls the user's modules.
INNERMOST_FRAMES = 3
# Between that call and the operator that blocks lie frames of torch's dispatcher, and of the suite's own tap on it.
DISPATCH_FRAME = re.compile(r"/torch/(_ops|_compile)\.py|/torch/(_dynamo|_library)/|/instruments/dispatch_tap\.py")


class PoolError(RuntimeError):
    """The pool itself failed (its server died, a rank did not start), through the suite or the machine."""


class RunFailed(Exception):
    """At least one rank did not finish its task.

    `kind` is "raised" (an exception in the task), "crash" (a rank ended: signal, or exit with any code) or "timeout".
    `reason` is one line about `first_rank`, the rank that failed first; `ranks` has a report for each rank.
    """

    def __init__(self, *, kind: FailureKind, first_rank: int, reason: str, ranks: tuple[RankReport, ...]) -> None:
        super().__init__(reason)
        self.kind = kind
        self.first_rank = first_rank
        self.reason = reason
        self.ranks = ranks

    def details(self) -> str:
        """Return tracebacks, stacks, last collectives and ends of the output of all ranks, in several lines."""
        return "\n".join([self.reason, *(_describe(report) for report in self.ranks)])


def find_cause(ranks: Sequence[RankReport], *, deadline_s: float) -> RunFailed:
    """Return the error that names the rank which failed first; at least one report must not be "finished".

    A death, or an exception raised by a rank's own work, takes precedence over exceptions about a lost peer; otherwise
    the earlier event is. If all exceptions are about lost peers, the cause is a hung rank that was not itself waiting
    for a peer.
    """
    failures = [report for report in ranks if report.state in ("raised", "died")]
    hung = [report for report in ranks if report.state == "hung"]
    stuck = [report for report in hung if not waits_for_peers(report.stack)]
    first = min(failures, key=lambda report: (is_peer_loss(report), report.stamp_s), default=None)
    if first is None:
        reason = _timeout_reason(ranks, hung=hung, stuck=stuck, deadline_s=deadline_s)
        return RunFailed(kind="timeout", first_rank=(stuck or hung)[0].rank, reason=reason, ranks=tuple(ranks))
    if stuck and is_peer_loss(first):
        reason = f"{_names(stuck)} did not answer; rank {first.rank} {outcome(first)}"
        return RunFailed(kind="timeout", first_rank=stuck[0].rank, reason=reason, ranks=tuple(ranks))
    kind: FailureKind = "crash" if first.state == "died" else "raised"
    reason = f"rank {first.rank} {outcome(first)}"
    return RunFailed(kind=kind, first_rank=first.rank, reason=reason, ranks=tuple(ranks))


def is_peer_loss(report: RankReport) -> bool:
    """Return whether the rank's exception is about the end of another rank."""
    return report.state == "raised" and (
        report.exception_type in PEER_LOSS_TYPES or PEER_LOSS_MESSAGE.search(report.message) is not None
    )


def waits_for_peers(stack: str) -> bool:
    """Return whether a dump of all threads by `faulthandler` shows a thread inside a torch.distributed call."""
    threads = re.split(r"^.*[Tt]hread 0x.*$", stack, flags=re.MULTILINE)
    frames = ([f for f in text.strip().splitlines() if not DISPATCH_FRAME.search(f)] for text in threads)
    return any("/torch/distributed/" in frame for thread in frames for frame in thread[:INNERMOST_FRAMES])


def outcome(report: RankReport) -> str:
    """Return the end of the sentence "rank N ..."."""
    if report.state == "finished":
        return "finished"
    if report.state == "raised":
        return f"raised {report.exception_type}: {report.message}".rstrip(": ")
    if report.state == "hung":
        return report.message or ("hung (waiting for its peers)" if waits_for_peers(report.stack) else "hung")
    return report.message or _ending(report.exit_code)


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "ended in an unknown way"
    if exit_code >= 0:
        return f"exited with code {exit_code} before finishing"
    number = -exit_code
    known = {member.value: member.name for member in signal.Signals}
    return f"was killed by {known.get(number, f'signal {number}')}"


def _timeout_reason(
    ranks: Sequence[RankReport], *, hung: Sequence[RankReport], stuck: Sequence[RankReport], deadline_s: float
) -> str:
    clauses = [f"no result from {_names(hung)} within {deadline_s:g} s"]
    if stuck and len(stuck) < len(hung):
        clauses.append(f"{_names(stuck)} did not wait for a peer")
    finished = [report for report in ranks if report.state == "finished"]
    if finished:
        clauses.append(f"{_names(finished)} finished")
    return "; ".join(clauses)


def _names(reports: Iterable[RankReport]) -> str:
    numbers = [str(report.rank) for report in reports]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(numbers)}"


def _describe(report: RankReport) -> str:
    sections = [f"--- rank {report.rank} {outcome(report)}"]
    for title, text in (
        ("traceback", report.traceback),
        ("stacks of all threads", report.stack),
        ("last collectives", report.collectives),
        ("end of the output", report.output_tail),
    ):
        if text.strip():
            sections.append(f"{title} of rank {report.rank}:\n{text.rstrip()}")
    return "\n".join(sections)
