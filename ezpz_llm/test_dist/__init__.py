"""A short, judged training run that says whether an allocation is healthy."""
