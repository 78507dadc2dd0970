"""Launcher: allocations, MPI dialects, the rank shim, supervision, and exit codes (without torch)."""
