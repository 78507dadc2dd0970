"""Where the time of one run went, from the traces and records in its directory."""
