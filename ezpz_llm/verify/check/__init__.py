"""Preflight and doctor: check that nodes, devices and links are fit for a run.

`findings.py` has the format in which preflight, doctor, and test_dist report. `facts.py` has the types of facts and
measurements. `node_facts.py` reads the facts of this machine, for preflight and doctor. `doctor.py` and
`software.py` check this machine. `rules/` derives findings from the facts of all ranks, without side effects. The
other modules gather these facts within a time limit, even if some ranks hang: `coordinator.py` and `server.py` on
rank 0, `client.py`, `measuring_process.py` and `measurements.py` on every rank, and `endpoint.py` and `messages.py`
on both sides.
"""
