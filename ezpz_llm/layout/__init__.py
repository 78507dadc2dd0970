"""The layout of a run as a value: ds_config, rules and suggestions, batch, memory (imports no torch)."""
