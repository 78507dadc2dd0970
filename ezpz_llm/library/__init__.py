"""The public library: what `import ezpz_llm` offers a training script of one's own (see docs/use/library.md)."""
