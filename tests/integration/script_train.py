"""A user's training script, run by the tests under the launcher and under plain python. Knows nothing of LazyTrain.

argv: a JSON object {"config": ..., "steps": n, "trouble": "" | "raise" | "sleep"}, possibly behind launcher arguments.
Prints LOSSES and one line when it has reached the trouble.
"""

import json
import sys
import time

import deepspeed
import torch
from torch import distributed

from tests import models

LENGTH = 128


def main() -> None:
    options = json.loads(next(argument for argument in sys.argv[1:] if argument.startswith("{")))
    torch.manual_seed(0)
    model = models.GPT(blocks=3, length=LENGTH, dropout=0.0)
    engine, *_ = deepspeed.initialize(model=model, config=options["config"])
    rank, losses = distributed.get_rank(), []
    for step in range(options["steps"]):
        tokens = models.batch(10 * step + rank, length=LENGTH)
        loss = engine(input_ids=tokens, labels=tokens)
        if step == options["steps"] - 1 and options["trouble"] == "raise":
            raise ValueError("a mistake in the user's code")
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        distributed.all_reduce(total)
        losses.append(total.item())
        if step == options["steps"] - 1 and options["trouble"] == "sleep":
            print("READY", flush=True)
            while True:  # goes on training, as a run that is interrupted does
                engine.backward(engine(input_ids=tokens, labels=tokens))
                engine.step()
                time.sleep(0.01)
    if rank == 0:
        print("LOSSES " + json.dumps([loss.hex() for loss in losses]), flush=True)
    # Stock DeepSpeed on a CPU leaves gloo's threads to the interpreter's exit, where they rarely end it with
    # "terminate called without an active exception" (about one run in hundreds).
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
