"""`certify`: compare every parallel layout with a single-process run, within stated tolerances."""
