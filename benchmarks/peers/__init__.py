"""The programs that benchmarks/peers.py compares, each run in processes of its own by `python3 -m peers.worker`."""
