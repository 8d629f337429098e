"""Runs: cells and experiments are executed on ranks, once per session, and leave records.

May import plan, the facts of instruments, the trainer's configuration and the modules below them; torch-free, except
`ranks.process` and `ranks.server`. Start reading at `case_runs` (the runs of a law's case), then follow a run: `store`
(records of the session), `pool` (warm ranks), `world` (the ranks of one world), `ranks` (their processes). `record` is
what laws read afterwards; `failures` says which rank failed first; `devices` leases GPUs and processors; `multihost`
spans worlds over hosts; `torch_support` has the limits of torch versions.
"""
