"""Reasons of the rows that are not right, by name."""

WHY: dict[str, str] = {
    "diffusion_ema": (
        "`memory-by-phase` on fp32 cells: 28576 bytes are held when backward begins, and its model has room for 24388"
    ),
}
