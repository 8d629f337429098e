"""OLMo-core divides the loss by the valid tokens of each rank, and FSDP averages: tokens weigh by those beside them.

`TransformerTrainModule.train_batch` (olmo_core/train/train_module/transformer/train_module.py) divides by the labels
that count on its own rank. With packed pretraining data all labels count, and nothing is wrong.

package: ai2-olmo-core
severity: high
visible: silent
training: with masked labels, gradients are those of the mean of the ranks' means, and not of the mean over all tokens
thread: none known
law: gradients
avoid: sum the number of valid tokens over data-parallel ranks, and multiply the loss by the number of ranks
ranks: 2
"""

import sys

import torch
import torch.distributed as dist
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModule

TOKENS, VALID, CPU = 16, (15, 3), torch.device("cpu")
TransformerTrainModule.record_metric = TransformerTrainModule.record_ce_loss = lambda *_args, **_kwargs: None
dist.init_process_group("gloo")
config = TransformerConfig.llama_like(d_model=32, vocab_size=64, n_layers=1, n_heads=4)
models = [config.build(init_device="cpu") for _ in range(2)]
for model in models:
    model.init_weights(max_seq_len=TOKENS, device=CPU)
batches = [{"input_ids": torch.arange(TOKENS)[None] * (3 + 4 * rank) % 64} for rank in range(2)]
for batch, valid in zip(batches, VALID, strict=True):
    batch["labels"] = batch["input_ids"].roll(-1, 1).masked_fill(torch.arange(TOKENS) >= valid, -100)
    out = models[0](**batch, ignore_index=-100, loss_reduction="sum", return_logits=False)
    (out.loss / sum(VALID)).backward()
fsdp = TransformerDataParallelConfig(name=DataParallelType.fsdp)
module = TransformerTrainModule(models[1], AdamWConfig(), TOKENS, TOKENS, dp_config=fsdp, device=CPU)
module.train_batch(batches[dist.get_rank()])
expected, got = (m.lm_head.w_out.weight.grad for m in models)
deviation = float((got.full_tensor() - expected).norm() / expected.norm())
print(f"rank {dist.get_rank()}: expected the mean over {sum(VALID)} labels, got a gradient {deviation:.2g} off")
dist.destroy_process_group()
sys.exit(int(deviation > 1e-3))
