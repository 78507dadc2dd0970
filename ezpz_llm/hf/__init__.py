"""Models from and for Hugging Face: names, configurations, weights read and written piece by piece."""
