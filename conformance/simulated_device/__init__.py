"""Door for any Python program: importing this module makes `sim` the accelerator of the process.

It is what `import torch_npu` is for another accelerator: afterwards `torch.accelerator`, `torch.device("sim")` and
`torch.sim` work. The variables of the environment in `conformance/sim/settings.py` choose the schedule and the number
of devices; call `conformance.sim.enabling.enable` instead to choose them in Python.
"""

from conformance.sim.enabling import enable

enable()
