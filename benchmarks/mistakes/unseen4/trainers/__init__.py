"""Ten correct trainers of other kinds than those of all earlier sets."""
