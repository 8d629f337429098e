"""Twelve correct trainers of kinds that the suite was not built on."""
