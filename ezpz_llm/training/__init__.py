"""Training: ranks, data, models, layouts, engines, checkpoints, and the loop."""
