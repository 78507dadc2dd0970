"""Preflight and doctor: check that nodes, devices and links are fit for a run.

`facts.py` reads facts of one machine, for preflight and doctor. `judge/` turns gathered facts into findings without
side effects. The other modules gather the facts of all ranks within a time limit, whatever hangs.
"""
