"""Sum ranks with mpi4py. MPI gets its ranks from the launcher, by PMI or PMIx."""

from mpi4py import MPI

world = MPI.COMM_WORLD
total = world.allreduce(world.rank + 1)
print(f"rank {world.rank} of {world.size}, sum of ranks {total}", flush=True)
