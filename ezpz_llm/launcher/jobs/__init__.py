"""Reservations: schedulers, nodes, and launch's own options."""
