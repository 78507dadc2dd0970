"""`launch --stage-env`: copy the Python environment to every node's local disk, and run from there.

Each of thousands of ranks that import torch reads tens of thousands of files from a shared file system. With
staging it serves a single file: an archive that is cached as long as the environment does not change, sent to every
node by sbcast or an MPI broadcast, unpacked by one process per node, and removed after the run.
"""
