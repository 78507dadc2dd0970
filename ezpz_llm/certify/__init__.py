"""Is every parallel layout the same maths as one process? What `certify` compares, and how closely."""
