"""Laws of any trainer: `conformance judge` holds them against the evidence of `conformance.subjects`."""
