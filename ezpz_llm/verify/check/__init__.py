"""Health checks: `preflight/` before a run, `test_dist/` as a run, and `doctor/` for one machine.

`findings.py` has the format in which all three report. `facts.py` has the types of facts and measurements.
`node_facts.py` reads the facts of this machine, for preflight and doctor.
"""
