"""How far a run has come in its data: the number of samples consumed and a rolling hash of their ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Samples [0, consumed) of the endless sample order have been trained on.

    The hash rolls sample by sample, so that it does not depend on how samples were cut into steps or ranks; two
    runs that consumed the same samples in the same order have the same hash.
    """

    consumed: int = 0
    sample_hash: str = ""

    def advance(self, samples: int) -> Position:
        """The position after the next `samples` samples."""
        digest = bytes.fromhex(self.sample_hash)
        for sample in range(self.consumed, self.consumed + samples):
            digest = hashlib.sha256(digest + sample.to_bytes(8, "little")).digest()
        return Position(self.consumed + samples, digest.hex())
