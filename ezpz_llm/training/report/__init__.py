"""Reports of runs: charts and tables in the terminal and as an HTML page (no torch)."""
