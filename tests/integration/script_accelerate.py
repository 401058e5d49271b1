"""A user's accelerate script: a loop of its own, a model from transformers. Knows nothing of LazyTrain."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim, DummyScheduler, set_seed

from tests.integration.hugging_face import Tokens, llama


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    model = llama()
    loader = torch.utils.data.DataLoader(Tokens(12), batch_size=2)
    if "optimizer" in accelerator.state.deepspeed_plugin.deepspeed_config:
        optimizer = DummyOptim(model.parameters(), lr=1e-3, weight_decay=0.1)
        scheduler = DummyScheduler(optimizer, total_num_steps=6, warmup_num_steps=1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(sys.argv[1])
    full = accelerator.get_state_dict(model)
    assert all(value.numel() > 0 for value in full.values())
    print("LOSSES " + json.dumps([type(model).__name__, losses]), flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
