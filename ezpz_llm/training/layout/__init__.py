"""Layout of a run: ds_config, rules and suggestions, batch sizes, memory estimate (imports no torch)."""
