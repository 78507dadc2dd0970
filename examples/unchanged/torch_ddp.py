"""Train with DistributedDataParallel, as in torch's tutorial.

The rank comes from the environment (env://).
"""

import os

import torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group()
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
has_gpu = torch.cuda.is_available()
# A rank that sees only its own device uses device 0.
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if has_gpu else "cpu"

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(8, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(1 + rank)
for _ in range(3):
    loss = model(torch.randn(4, 8, device=device)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
total = sum(parameter.sum().item() for parameter in model.parameters())
print(f"rank {rank} of {world_size}, sum of weights {total:.6f}", flush=True)
torch.distributed.destroy_process_group()
