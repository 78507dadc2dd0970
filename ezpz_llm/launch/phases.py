"""What a rank can be doing, as heartbeats name it."""

from __future__ import annotations

MEETING = "meeting"
STARTING = "starting"
LOADING = "loading data"
BUILDING = "building ops"
COMPILING = "compiling"
TRAINING = "training"
EVALUATING = "evaluating"
SAMPLING = "sampling"
SAVING = "saving"
ENDING = "ending"

PATIENT = frozenset({STARTING, LOADING, BUILDING, COMPILING, EVALUATING, SAMPLING, SAVING, ENDING})
"""Phases in which a rank may go without a heartbeat for as long as it, or one that it waits for, is at work."""
