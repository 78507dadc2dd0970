"""The training loop, its schedule and its typed configuration."""
