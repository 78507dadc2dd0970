"""Execution of a plan: checks, staging, supervision, and teardown."""
