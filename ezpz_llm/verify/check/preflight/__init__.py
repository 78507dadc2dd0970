"""Preflight: check that the nodes, devices and links of a job are fit for a run.

`rules/` derives findings from the facts of all ranks, without side effects. The other modules gather these facts
within a time limit, even if some ranks hang: `coordinator.py` and `server.py` on rank 0, `client.py`,
`measuring_process.py` and `measurements.py` on every rank, and `endpoint.py` and `messages.py` on both sides.
"""
