"""One node of a run: its folder in memory, the agent that gathers and obeys there, its reports, orders to it."""
