"""Callbacks of the trainer. Each extends a run at its steps, logs, evaluations, and checkpoints.

`callback.py` has the base class, `order.py` the order in which callbacks are called.
"""
