"""Third set: six trainers without a mistake, written before the suite was mended by the second set."""
