"""Options of the suite, of which another plugin may have claimed one first."""

import argparse
from contextlib import suppress
from typing import Any

import pytest

DEFAULT_PROFILE, DEFAULT_SEED = "pr", "0"
EXPLAIN_S, FAST_EXPLAIN_S = "30", "8"
"""Time to search for the first wrong places, and that of a fast session, in all of which a commit waits."""
SESSION_OPTIONS: dict[str, dict[str, Any]] = {
    "--profile": {"default": DEFAULT_PROFILE, "help": "profile of matrix.yaml (default: %(default)s)"},
    "--budget": {"metavar": "T", "help": "only the first cells, best first, that take this time: 90s, 5m or 1h"},
    "--cells": {"metavar": "EXPR", "help": "only these cells, such as 'tp=2 and precision=fp32', or an id"},
    "--laws": {"metavar": "IDS", "help": "only these laws, such as 'PAR-1,CLIP-*'"},
    "--seed": {
        "default": DEFAULT_SEED,
        "metavar": "N",
        "help": "add N to the seed of every cell: other weights and data",
    },
    "--shard": {"metavar": "I/N", "help": "only the I-th of N shards of the cells, for N machines"},
    "--accelerator": {
        "default": "auto",
        "metavar": "WHAT",
        "help": "auto (CUDA devices if available), cpu, cuda, or sim[:SCHEDULE] (a simulated accelerator)",
    },
    "--share-gpu": {
        "default": "auto",
        "metavar": "N",
        "help": "how many ranks may share a GPU where a world has more ranks than there are GPUs: auto, never or a "
        "number",
    },
    "--kernels": {
        "default": "torch",
        "metavar": "WHICH",
        "help": "kernels of the processors: torch (its own), or other:SEED, which add in an order drawn from the seed",
    },
    "--sums": {
        "default": "gloo",
        "metavar": "ORDER",
        "help": "order in which reductions over ranks add on processors: gloo (its own), ring (NCCL's) or tree",
    },
    "--shrink": {
        "default": "60",
        "metavar": "SECONDS",
        "help": "time to search for the smallest cells on which failures occur; 0: none (default: %(default)s)",
    },
    "--explain": {
        "metavar": "SECONDS",
        "help": "time to search for the first wrong places of failures; 0: none "
        f"(default: {EXPLAIN_S}, with --fast {FAST_EXPLAIN_S})",
    },
    "--subject": {
        "metavar": "TRAINER",
        "help": "judge another trainer: MODULE:NAME, FILE.py:NAME or a name of `conformance judge --list`",
    },
    "--no-faults": {
        "action": "store_true",
        "help": "with --subject: do not test whether the laws see faults in the trainer's steps",
    },
    "--fast": {"action": "store_true", "help": "with --subject: only the cells that show most; no faults"},
    "--accepted": {"metavar": "FILE", "help": "with --subject: failures that are accepted until a day"},
    "--annotations": {"action": "store_true", "help": "print annotations for GitHub Actions elsewhere, too"},
    "--torch-coverage": {
        "action": "store_true",
        "help": "measure which branches and options of torch the judged runs use: see `conformance coverage --torch`",
    },
    "--deadline": {
        "metavar": "SECONDS",
        "help": "time limit of the runs of one case (default: the profile's, longer on slower machines)",
    },
    "--isolate": {"action": "store_true", "help": "fresh processes for every run, instead of warm ones"},
    "--matrix": {"metavar": "FILE", "help": "matrix file (default: matrix.yaml of the project)"},
    "--report-dir": {
        "default": "conformance-report",
        "metavar": "DIR",
        "help": "where the report goes (default: %(default)s)",
    },
    "--record-dir": {"metavar": "DIR", "help": "where records go (default: DIR/records of the report)"},
    "--baseline": {
        "metavar": "DIR",
        "help": "an earlier report: a case that passes and has drifted is a quality-warning",
    },
    "--defect": {"metavar": "ID", "help": "inject a known fault, or FILE.py:NAME; the laws that it violates must fail"},
}


def add_options(parser: pytest.Parser) -> list[str]:
    """Add the options of the suite; returns those that cannot be added, since another plugin has claimed them."""
    group = parser.getgroup("conformance", "FSDP2 + TP conformance suite")
    claimed = []
    for name, attributes in SESSION_OPTIONS.items():
        try:
            group.addoption(name, **attributes)
        except (ValueError, argparse.ArgumentError):
            claimed.append(name)
            with suppress(argparse.ArgumentError):  # if only the destination is taken: pytest must know the option
                group.addoption(name, **attributes, dest="claimed")
    return claimed
