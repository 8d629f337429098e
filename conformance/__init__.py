"""Conformance suite for FSDP2 and tensor parallelism in PyTorch.

The folders stand in the order in which a cell travels through the suite:

- `plan`: the laws that are judged on each cell (matrix.yaml), and the cases that a profile selects.
- `run`: executes cells and experiments on ranks, at most once per session, and keeps their records.
- `judge`: turns a case into a verdict.
- `report`: the session's results as JSON, text and HTML, and the difference between two reports.

Other folders support these four:

- `experiments`: functions that ranks call for a law, with `instruments` that observe a run without changing it.
- `laws`: the statements that MUST hold, each with the test that asserts it.
- `oracles`: the expected results, computed a second time without FSDP2.
- `defects`: known faults that can be injected, and `detection`, which checks that the laws notice them.
- `subjects`: other people's trainers, with laws of their own that `conformance judge` asks for.
- `pytest_plugin`: hooks that make a pytest session of the laws. `cli`: the commands of `python -m conformance`.

Imports point one way, bottom up, in the order of `project.LAYERS`. Processes that only plan, start, judge and report
never import torch: plan, run (but `run.ranks.process` and `run.ranks.server`), judge, report and pytest_plugin do
without it. `tests/fast/test_quality.py` checks both rules.

Start reading at `plan.cells`, `laws.test_par`, `judge.judge` and `run.case_runs`.
"""
