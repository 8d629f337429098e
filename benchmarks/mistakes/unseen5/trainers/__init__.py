"""Ten correct trainers, each of another field than those of all earlier sets."""
