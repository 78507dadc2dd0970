"""Data pipeline: text to token shards to samples, where sample i is a pure function of (seed, i).

`prepare` converts a corpus to a folder of shards once. `TokenData` opens that folder. `Batches` and
`ValidationWindows` select the tokens of a step. The package uses no process group: callers pass
dp_rank and dp_size.
"""
