"""Programs that benchmarks/peers.py compares, each run in separate processes by `python3 -m peers.worker`."""
