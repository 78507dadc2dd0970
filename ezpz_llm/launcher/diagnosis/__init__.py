"""Post-mortem of a run: records of failed ranks, choice of the root cause, and the text that is printed."""
