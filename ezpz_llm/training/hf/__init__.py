"""Import and export of Hugging Face models: configurations, tensor names, tokenizers and weights."""
