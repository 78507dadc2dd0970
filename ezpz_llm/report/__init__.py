"""Runs as charts and tables, in the terminal and as one page (no torch)."""
