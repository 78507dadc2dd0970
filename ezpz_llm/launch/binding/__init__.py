"""Which cores and which device each rank of a host gets."""
