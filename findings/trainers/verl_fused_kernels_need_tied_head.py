"""verl with FSDP2, fused kernels and an untied head raises: the head is its own group, which is never gathered.

`apply_fsdp2` (verl/utils/fsdp_utils.py) shards an untied `lm_head` by itself; the fused forward pass reads
`lm_head.weight` without calling `lm_head`.

package: verl
severity: medium
visible: loud
training: it cannot begin with use_fused_kernels and an untied head
thread: https://github.com/verl-project/verl/issues/5633
law: none
avoid: leave the head to the root's group, or switch fused kernels off
ranks: 2
"""

import os
import sys

import torch
import torch.distributed as dist
import verl.utils.fsdp_utils as fsdp
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen3Config, Qwen3ForCausalLM
from verl.models.transformers.dense_common import forward_with_torch_backend

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
config = Qwen3Config(vocab_size=64, num_hidden_layers=1, tie_word_embeddings=False, **sizes)
Qwen3ForCausalLM.forward = forward_with_torch_backend  # as verl's monkey patch does
model = Qwen3ForCausalLM(config)
fsdp.apply_fsdp2(model, {"mesh": mesh, "reshard_after_forward": True}, {"wrap_policy": {}})
tokens, raised = torch.randint(64, (2, 8)), None
try:
    model(input_ids=tokens, labels=tokens, temperature=1.0, return_dict=True).log_probs.sum().backward()
except RuntimeError as error:
    raised = error
print(f"rank {dist.get_rank()}: expected gradients, got {raised}")
dist.destroy_process_group()
sys.exit(int(raised is not None))
