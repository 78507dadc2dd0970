/* A program in C with an MPI of its own. */

#include <mpi.h>
#include <stdio.h>

int main(int argc, char **argv) {
    int rank, size, own, total;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    own = rank + 1;
    MPI_Allreduce(&own, &total, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    printf("rank %d of %d, sum of ranks %d\n", rank, size, total);
    return MPI_Finalize();
}
