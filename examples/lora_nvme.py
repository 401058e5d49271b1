"""LoRA over a frozen model whose weights stay on an SSD: for a model that fits neither the GPU nor host memory.

A plain DeepSpeed and PEFT script. The frozen weights are read from NVMe block by block and never written back; only
the adapter has gradients and optimizer states.

    deepspeed --num_gpus 1 examples/lora_nvme.py --deepspeed_config examples/configs/lora_nvme.json \
        --model path/to/model --text notes.txt --output adapter

`--model` is a local directory with weights and a tokenizer; without it, a small random Llama over bytes. Set
"nvme_path" in the config to a directory on a local SSD. At the end the adapter is saved as `PeftModel.from_pretrained`
loads it.
"""

import argparse
import sysconfig
from pathlib import Path

import deepspeed
import torch
from deepspeed import comm
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig


def small_llama(length):
    """A Llama over bytes with random weights."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
    )


def load_ids(options):
    """The text as one row of token ids."""
    paths = [Path(file) for file in options.text] or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "\n".join(path.read_text(errors="replace") for path in paths)
    if options.model is None:
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    return torch.tensor(AutoTokenizer.from_pretrained(options.model).encode(text))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--model", help="local model directory with weights and tokenizer")
    parser.add_argument("--text", nargs="*", default=[], help="text files to train on")
    parser.add_argument("--output", default="adapter")
    parser.add_argument("--length", type=int, default=256, help="tokens per sample")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=8, help="of the adapter's matrices")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything runs")
    parser = deepspeed.add_config_arguments(parser)
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.length = 3, 16

    torch.manual_seed(0)
    loading = HfDeepSpeedConfig(options.deepspeed_config)  # from here on transformers partitions while it loads
    if options.model is None:
        model = AutoModelForCausalLM.from_config(small_llama(options.length))
    else:
        model = AutoModelForCausalLM.from_pretrained(options.model)
    adapted = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapted)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=trainable)
    del loading
    chief = comm.get_rank() == 0

    ids = load_ids(options)
    generator = torch.Generator().manual_seed(1 + comm.get_rank())
    first = None
    while engine.global_steps < options.steps:
        starts = torch.randint(
            len(ids) - options.length, (engine.train_micro_batch_size_per_gpu(),), generator=generator
        )
        rows = torch.stack([ids[start : start + options.length] for start in starts.tolist()]).to(engine.device)
        loss = engine(input_ids=rows, labels=rows).loss
        engine.backward(loss)
        engine.step()
        first = loss.item() if first is None else first
        if chief and engine.global_steps % max(1, options.steps // 10) == 0:
            print(f"step {engine.global_steps}: loss {loss.item():.4f}", flush=True)

    with deepspeed.zero.GatheredParameters(trainable):
        if chief:
            # PEFT names what belongs to the adapter; under ZeRO-3 the other weights are placeholders here.
            state = {name: value.detach().cpu().clone() for name, value in get_peft_model_state_dict(model).items()}
            model.save_pretrained(options.output, state_dict=state)
            print(f"loss {first:.4f} at first, {loss.item():.4f} after {options.steps} steps; saved {options.output}")
    engine.destroy()


if __name__ == "__main__":
    main()
