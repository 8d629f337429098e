"""Third set: six trainers without a mistake, written together with the second set."""
