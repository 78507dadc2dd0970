"""Launch, train, check and measure GPT training under DeepSpeed on any HPC reservation, or none."""

__version__ = "0.1.0"
