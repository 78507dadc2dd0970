"""One GPT for GPT-2 and Llama shapes: its configuration, layers, initialisation and arithmetic."""
