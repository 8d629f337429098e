"""Laws of order: what is gathered, reduced, resharded and recomputed when, in pipelines too, and on which streams."""
