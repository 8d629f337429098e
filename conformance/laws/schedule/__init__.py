"""Laws of order: times and streams of gathers, reductions, resharding and recomputation, in pipelines too."""
