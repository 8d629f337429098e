"""A small, readable, real FSDP2 + tensor parallel trainer. Read it in the order of `train.py`."""
