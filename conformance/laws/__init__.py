"""Laws: statements about FSDP2 and tensor parallelism that MUST hold, each asserted by one test.

A folder is a chapter, a file a family of ids: `numerics/test_par.py` has PAR-1 to PAR-10; README.md lists all laws. May
import assertions, experiments, judge, run, plan, instruments, oracles and the trainer; only the registry imports laws,
by name. Start reading at `numerics/test_par.py`.
"""
