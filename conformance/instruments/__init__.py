"""Instruments: measurements of a rank while it trains, which do not change the run.

Most are observers of the trainer (`reference_trainer.observer.Observer`) or listeners of the dispatch tap; `recorder`
combines them for a training run, and `facts` has the structs that they leave, in builtin types and without torch.
Memory has ledgers: `memory` on the host, `device_memory` on a device, `fake_tensors` for tensors without memory.
Instruments only measure: laws compare the facts with `conformance.oracles`.

May import `reference_trainer` and `conformance.memory_segment`, nothing else of the suite: not `oracles`, `laws`,
`run`, `judge`, `experiments` or `defects`. Start reading at `recorder` and `facts`.
"""
