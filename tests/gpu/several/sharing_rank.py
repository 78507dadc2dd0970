"""Start a rank that shares the node's first GPU with other ranks.

    launch --wrap "python3 tests/gpu/several/sharing_rank.py" …

NCCL refuses two ranks on one GPU if they are on one host, which it recognizes by NCCL_HOSTID.
"""

from __future__ import annotations

import os
import sys

os.environ["NCCL_HOSTID"] = f"rank{os.environ['EZPZ_LLM_RANK']}"
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
os.environ["EZPZ_LLM_SHARED_DEVICES"] = "warn"
os.execvp(sys.argv[1], sys.argv[1:])
