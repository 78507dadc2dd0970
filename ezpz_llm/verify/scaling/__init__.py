"""Scaling studies: run a training command at several sizes of an allocation, and report the results."""
