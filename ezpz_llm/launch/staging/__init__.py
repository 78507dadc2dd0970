"""`launch --stage-env`: the Python environment copied to every host's own disk once, and the run started there.

Thousands of ranks that import torch ask a shared file system for tens of thousands of files each. Here it is asked
for one file: an archive, kept in the cache for as long as the environment does not change, brought to every host by
sbcast or by a broadcast over MPI, unpacked there by one process a host, and removed after the run.
"""
