"""Pools of ranks that start none: a test gives them its own `run`."""


class NoPools:
    """Pools without ranks, for stores of records."""

    waited_s = trained_s = 0.0
    max_world_size = 8

    def prepare(self, template: object = None) -> None: ...

    def close(self) -> None: ...
