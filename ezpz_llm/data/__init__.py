"""From text to token shards to samples: sample i is a pure function of (seed, i).

`prepare` turns a corpus into a folder of shards once; `TokenData` opens it; `Batches` and `ValidationWindows`
say which tokens a step takes. Nothing here knows of ranks beyond the (dp_rank, dp_size) it is given.
"""
