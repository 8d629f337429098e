"""Faults that can be injected into rank processes, each with a benign twin: the proof that every law can fail.

Start with `injection`, which says what a `Defect` is and how a fault replaces an attribute. `catalogue` lists all
defects and injects them by id. Each `*_faults` module holds the defects of one subject: below each function that
injects a fault stand the defects that use it.

The package may import `conformance.plan`, `conformance.instruments`, `reference_trainer` and torch; not `laws`, `run`
or `judge`. Rank processes import it, and the controller does so only to look up ids.
"""
