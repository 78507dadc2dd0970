"""Step-time breakdown of one run, from the traces and records in its directory."""
