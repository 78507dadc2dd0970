"""Names of the variables that launch gives to every rank (the run directory's is in rundir/)."""

from __future__ import annotations

RUN_ID_VARIABLE = "EZPZ_LLM_RUN_ID"
"""The run's marker: unique for each launch, and how its processes are found."""

WORLD_SIZE_VARIABLE = "EZPZ_LLM_WORLD_SIZE"
"""The number of ranks that launch starts."""

ENDS_AT_VARIABLE = "EZPZ_LLM_ENDS_AT"
"""When the reservation ends, in epoch seconds; unset where it is not known."""
