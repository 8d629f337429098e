"""Modules that the server of test processes imports before it forks, with the device, so that tests start fast."""

import torch._dynamo
import torch._inductor.utils
import torch.distributed._composable
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.nn.parallel  # noqa: F401

from conformance.sim_runs.pytorch_tests.harness import prepare

prepare()
