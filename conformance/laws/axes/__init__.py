"""Law of axes: each option of a cell takes effect."""
