"""Evaluate a trained model: validation loss, tasks and samples of its text."""
