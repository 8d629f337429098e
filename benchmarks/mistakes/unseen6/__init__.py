"""Ten correct trainers and twenty mistakes in them, written after five sets were known and before any was judged."""
