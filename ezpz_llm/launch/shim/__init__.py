"""The rank shim: a small process around one rank of any program.

It inherits every descriptor (a closed PMI_FD ends MPI_Init), keeps the rank in its own process group, forwards
signals, writes the rank's log, records a failure in errors/, and ends with the rank's own code, or 128 + the
signal's number. One is started a rank, on thousands of nodes at once: it imports little.
"""
