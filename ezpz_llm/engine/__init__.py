"""From a ds_config to a model in training.

The resolver half (`ds_config`, `batch`, `layout`, `resolve`, `ops`) imports neither torch nor DeepSpeed, so that
every configuration error is found before anything starts; `build` imports the engine that a layout needs.
"""
