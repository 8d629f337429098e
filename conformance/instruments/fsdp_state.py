"""Private state of FSDP2's modules: an error says what to adapt for a torch that keeps it elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def private_state(reader: str, content: str) -> Iterator[None]:
    """Read private attributes of FSDP2 in the context.

    Raises RuntimeError, with the version of torch, instead of AttributeError: the module `reader`, which reads the
    content, has to be adapted.
    """
    try:
        yield
    except AttributeError as error:
        raise RuntimeError(f"torch {torch.__version__}: {error}; adapt {reader}, which reads {content}") from None
