"""Train with Hugging Face accelerate, without its launcher."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import ezpz_llm

accelerator = Accelerator()
ezpz_llm.setup()
set_seed(0)
model = torch.nn.Linear(8, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
set_seed(1 + accelerator.process_index)
for step in range(1, 4):
    loss = model(torch.randn(4, 8, device=accelerator.device)).square().mean()
    optimizer.zero_grad()
    accelerator.backward(loss)
    optimizer.step()
    ezpz_llm.record(step, loss=loss, tokens=4)
total = sum(parameter.sum().item() for parameter in model.parameters())
print(f"rank {accelerator.process_index} of {accelerator.num_processes}, sum of weights {total:.6f}", flush=True)
ezpz_llm.finish()
accelerator.end_training()
