"""From a reservation to running ranks: hosts, MPI dialects, the rank shim, supervision, exit codes (no torch)."""
