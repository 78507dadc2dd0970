"""Why a run ended: records of failed ranks, which of them was the cause, and how it is told."""
