"""Train with Hugging Face's Trainer, without its launcher."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=64)
tokens = torch.randint(64, (64, 16), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(output_dir=folder, max_steps=3, save_strategy="no", report_to=[])
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data)
    trainer.train()
rank, world_size = arguments.process_index, arguments.world_size
total = sum(parameter.sum().item() for parameter in trainer.model.parameters())
print(f"rank {rank} of {world_size}, sum of weights {total:.6f}", flush=True)
