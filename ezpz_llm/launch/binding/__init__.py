"""Binding of a host's ranks to cores and devices."""
