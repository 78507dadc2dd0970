"""The rank shim: a small process around one rank of any program.

The shim passes on all file descriptors (MPI_Init fails with a closed PMI_FD), keeps the rank in its own process
group, forwards signals, writes the rank's log, records a failure in errors/, and exits with the rank's code, or
with 128 + the signal's number. It imports little, because one shim per rank starts on thousands of nodes at once.
"""
