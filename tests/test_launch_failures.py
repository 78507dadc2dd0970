"""Which of several failed ranks is the cause."""
from __future__ import annotations
