"""Train with Hugging Face accelerate, without its launcher."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

accelerator = Accelerator()
set_seed(0)
model = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
set_seed(1 + accelerator.process_index)
for _ in range(3):
    loss = model(torch.randn(4, 8, device=accelerator.device)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
total = sum(parameter.sum().item() for parameter in model.parameters())
print(f"rank {accelerator.process_index} of {accelerator.num_processes}, sum of weights {total:.6f}", flush=True)
accelerator.end_training()
