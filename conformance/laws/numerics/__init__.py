"""Laws of numbers: parity with one process in fp32 and 16 bits, loss scaling, clipping, offload, optimizers, data."""
