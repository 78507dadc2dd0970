"""The command `ezpz-llm checkpoint`."""
