"""Node-level parts of a run: the folder in memory, the agent, its reports, and orders to it."""
