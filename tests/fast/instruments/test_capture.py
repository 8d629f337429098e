"""Fingerprints: equal for equal bits, shapes and dtypes, however they lie in memory."""

import torch

from conformance.instruments.capture import fingerprint


def test_fingerprint() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    same = [tensor.clone(), tensor.t().contiguous().t(), torch.cat([tensor, tensor])[:2]]
    others = [
        tensor.reshape(3, 2),
        tensor.double(),
        tensor.view(torch.int32),
        tensor.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(-0.0)),
        tensor.nextafter(torch.full_like(tensor, 9.0)),
        torch.tensor(1.0),
        torch.empty(0, 3),
    ]
    assert {fingerprint(other) for other in same} == {fingerprint(tensor)}
    assert len({fingerprint(other) for other in [tensor, *others]}) == len(others) + 1
