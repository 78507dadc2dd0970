"""Programs on every node: the rank shim, the agent, and patterns of known failures."""
