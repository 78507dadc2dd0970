"""Checks of this machine for `ezpz-llm doctor`."""
