"""Public API of `import ezpz_llm` for user training scripts (docs/use/library.md)."""
