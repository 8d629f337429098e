"""Modules that the server of test processes imports before it forks.

None of them may load the device, or ask which devices there are, as torch's test harness does when it is imported.
"""

import torch._dynamo
import torch._inductor.utils
import torch.distributed._composable
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401
