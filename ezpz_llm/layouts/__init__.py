"""Which layouts there are, and which are legal for a model on so many ranks."""
