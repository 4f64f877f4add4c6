"""The Trainer of transformers: a converted GPT-2 with fusedtrain's AdamW."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import fusedtrain
from fusedtrain.integrations.accelerate import use_fused_scaler

config = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, n_positions=32,
                    bos_token_id=0, eos_token_id=0)  # fmt: skip
model = GPT2LMHeadModel(config)
text = (torch.arange(20)[:, None] + 3 * torch.arange(32)) % 64  # counts by threes
rows = [{"input_ids": row, "labels": row} for row in text]
print(fusedtrain.convert(model, {"input_ids": text[:2], "labels": text[:2]}))

arguments = TrainingArguments(
    output_dir="out", num_train_epochs=4, per_device_train_batch_size=5, max_grad_norm=1.0,
    learning_rate=1e-2, fp16=torch.cuda.is_available(), report_to=[], save_strategy="no",
)  # fmt: skip
trainer = Trainer(
    model=model, args=arguments, train_dataset=rows,
    # Or optimizers=(fusedtrain.optim.AdamW(groups), None), with groups of your own.
    optimizer_cls_and_kwargs=(fusedtrain.optim.AdamW, {"lr": arguments.learning_rate}),
)  # fmt: skip
use_fused_scaler(trainer.accelerator)  # before train
print(f"loss {trainer.train().training_loss:.3f}")
