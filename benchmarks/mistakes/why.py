"""Reasons of the rows that are not right, by name."""

WHY: dict[str, str] = {}
