"""Facts and tools without a reservation: variables, ranks, hosts, processes, addresses."""
