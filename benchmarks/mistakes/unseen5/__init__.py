"""Fifth set: ten trainers and twelve mistakes, by an author who had not seen how the suite decides."""
