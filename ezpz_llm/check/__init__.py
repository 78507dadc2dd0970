"""Is this reservation fit for a run? What every rank finds on its host is gathered, compared and measured.

`facts/` reads one machine (doctor uses it too), `judge/` turns gathered facts into findings without touching
anything, and the rest brings the facts of all ranks together within a time limit, whatever hangs.
"""
