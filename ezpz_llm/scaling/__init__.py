"""Scaling studies: run a training command at several sizes of a reservation, and report the results."""
