"""GPT model for GPT-2 and Llama shapes: configuration, layers, initialization, parameter and FLOP counts."""
