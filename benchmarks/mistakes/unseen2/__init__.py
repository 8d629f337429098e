"""Second set of trainers and mistakes that were written after the suite, and before any of them was judged."""
