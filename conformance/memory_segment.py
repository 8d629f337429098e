"""Memory between two marks, which instruments measure, memory models predict and laws compare."""

import msgspec
from msgspec.structs import replace


class MemorySegment(msgspec.Struct):
    """Bytes held between two marks of a step, counting allocations since the ledger was opened."""

    mark: str
    """Name of the mark that began the segment."""
    start_bytes: int
    peak_bytes: int
    end_bytes: int
    allocated_bytes: int = 0
    """Peak of the bytes in use on a CUDA device, with rounding and earlier allocations; 0 on the CPU."""
    active_bytes: int = 0
    """Peak of the bytes in use, or freed but held until a stream has caught up; 0 on the CPU."""
    reserved_bytes: int = 0
    """Peak of the bytes that the caching allocator has reserved on the device; 0 on the CPU."""

    def above(self, held_bytes: int) -> "MemorySegment":
        """Return the segment with its bytes above `held_bytes`."""
        return replace(
            self,
            start_bytes=self.start_bytes - held_bytes,
            peak_bytes=self.peak_bytes - held_bytes,
            end_bytes=self.end_bytes - held_bytes,
        )
