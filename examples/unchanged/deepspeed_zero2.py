"""Train with DeepSpeed's `deepspeed.initialize` and ZeRO stage 2."""

import deepspeed
import torch

deepspeed.init_distributed()
rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
torch.manual_seed(1 + rank)
for _ in range(3):
    loss = engine(torch.randn(4, 8, device=engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
total = sum(parameter.sum().item() for parameter in engine.module.parameters())
print(f"rank {rank} of {world_size}, sum of weights {total:.6f}", flush=True)
torch.distributed.destroy_process_group()
