"""Faults that can be injected into rank processes, each with a benign twin: the proof that every law can fail.

Start with `injection`: a defect is a function under `@defect(...)`, which returns the context of the fault or of its
twin. `catalogue` lists all defects and injects them by id. Each `*_faults` module holds the defects of one subject;
edits.yaml holds those that edit a statement of torch or of the trainer, see `edits`.

The package may import `conformance.plan`, `conformance.instruments`, `reference_trainer` and torch; not `laws`, `run`
or `judge`. Rank processes import it, and the controller does so only to look up ids.
"""
