"""Binding of a node's ranks to cores and devices."""
