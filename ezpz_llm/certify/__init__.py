"""`certify`: compare every parallel layout with one process, within stated tolerances."""
