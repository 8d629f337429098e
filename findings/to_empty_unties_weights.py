"""`to_empty` of a model on the meta device replaces a tied weight by two.

`Module._apply` makes a new parameter for each name.

severity: medium
visible: silent
training: embedding and output layer are trained apart
thread: https://github.com/volcengine/verl/issues/7834
law: INIT-7
avoid: tie weights after to_empty
ranks: 1
"""

import sys

import torch
from torch import nn

with torch.device("meta"):
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "output": nn.Linear(2, 4, bias=False)})
    model["output"].weight = model["embedding"].weight
model.to_empty(device="cpu")
tied = model["output"].weight is model["embedding"].weight
print(f"expected 1 parameter, got {len(list(model.parameters()))}")
sys.exit(int(not tied))
