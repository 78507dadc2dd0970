"""What one process finds on its host, as values that JSON can hold (imports no torch)."""
