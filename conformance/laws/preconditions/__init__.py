"""Laws of the machine and the method: without them no other law means anything."""
