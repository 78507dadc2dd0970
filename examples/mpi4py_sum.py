"""Sum ranks with mpi4py. MPI gets its ranks from the launcher, by PMI or PMIx."""

from mpi4py import MPI

import ezpz_llm

world = MPI.COMM_WORLD
ezpz_llm.setup()
total = world.allreduce(world.rank + 1)
ezpz_llm.record(1, loss=total)
print(f"rank {world.rank} of {world.size}, sum of ranks {total}", flush=True)
ezpz_llm.finish()
