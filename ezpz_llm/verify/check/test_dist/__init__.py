"""Health check of an allocation: all-reduces and a short training run."""
