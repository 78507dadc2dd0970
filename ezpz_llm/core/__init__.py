"""Base and the run directory; imports no other package of ezpz_llm, and no torch."""
