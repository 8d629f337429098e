"""Six small trainers of different kinds, each conformant, into which the mistakes are patched."""
