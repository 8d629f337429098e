"""Laws: statements about FSDP2 and tensor parallelism that MUST hold, each asserted by one test.

May import experiments, judge, run, plan, instruments, oracles and the trainer. A file holds a family of ids: `test_par`
has PAR-1 to PAR-10; docs/laws.md lists all laws. Start reading at `test_par`, with `compare` (comparisons that record
their metric), `steps`, `dropout` and `memory_bounds` (what several laws share) and `fixtures`.
"""
