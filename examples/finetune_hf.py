"""Fine-tune a causal language model with the Hugging Face Trainer: every parameter, on one GPU or on a CPU.

A plain Trainer script: how it is trained stands in TrainingArguments and in the DeepSpeed config, whose "auto" values
the Trainer fills in.

    deepspeed --num_gpus 1 examples/finetune_hf.py --model path/to/model --text notes.txt more.txt --output out \
        --deepspeed examples/configs/hf_auto.json

`--model` is a local directory with weights (they are loaded), or one with a config.json alone (the model starts from
random weights, which is for trying things out). Without `--model` it is a small Llama over bytes, without `--text` the
text is the Python standard library's own source. At the end the model is saved as `from_pretrained` loads it, and
continues a line.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


class Bytes:
    """Text to token ids and back where a model comes without a tokenizer: one id a byte."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(number for number in ids if number < 256).decode(errors="replace")


class Windows(torch.utils.data.Dataset):
    """Consecutive windows of `length` token ids."""

    def __init__(self, ids, length):
        self.windows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def small_llama(length):
    """Config of a Llama over bytes that a CPU trains in minutes."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=length,
        bos_token_id=None,
        eos_token_id=None,
    )


def load_model(folder, length):
    """The model and its tokenizer. Called after TrainingArguments exist, so that ZeRO-3 partitions while it loads."""
    if folder is None:
        return AutoModelForCausalLM.from_config(small_llama(length)), Bytes()
    files = {file.name for file in Path(folder).iterdir()}
    has_weights = any(name.endswith((".safetensors", ".bin")) for name in files)
    tokenizer = AutoTokenizer.from_pretrained(folder) if "tokenizer_config.json" in files else Bytes()
    if has_weights:
        return AutoModelForCausalLM.from_pretrained(folder), tokenizer
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)), tokenizer


def load_text(files, tokenizer):
    """(token ids for training, token ids for evaluation); the last tenth is for evaluation."""
    paths = [Path(file) for file in files] or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    ids = tokenizer.encode("\n".join(path.read_text(errors="replace") for path in paths))
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--deepspeed", required=True, help="DeepSpeed config")
    parser.add_argument("--model", help="local model directory, or a directory with a config.json")
    parser.add_argument("--text", nargs="*", default=[], help="text files to train on")
    parser.add_argument("--output", default="finetuned")
    parser.add_argument("--length", type=int, default=256, help="tokens per sample")
    parser.add_argument("--batch", type=int, default=4, help="samples per micro-step")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1e-3, help="for a model with weights rather 1e-5")
    parser.add_argument("--evaluated", type=int, default=32, help="samples in each evaluation")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint in --output")
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that everything runs")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.length, options.evaluated = 6, 32, 8

    set_seed(0)
    arguments = TrainingArguments(
        output_dir=options.output,
        deepspeed=options.deepspeed,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation,
        max_steps=options.steps,
        learning_rate=options.rate,
        warmup_steps=max(1, options.steps // 20),
        weight_decay=0.1,
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=max(1, options.steps // 20),
        eval_strategy="steps",
        eval_steps=max(1, options.steps // 2),
        save_strategy="steps",
        save_steps=max(1, options.steps // 2),
        save_total_limit=1,
        report_to=[],
    )
    model, tokenizer = load_model(options.model, options.length)
    training, evaluation = load_text(options.text, tokenizer)
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Windows(training, options.length),
        eval_dataset=Windows(evaluation[: options.evaluated * options.length], options.length),
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint=options.resume)
    trainer.save_model()
    if trainer.is_world_process_zero():
        found = [(entry["step"], entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry]
        print("evaluation loss:", ", ".join(f"{loss:.3f} at step {step}" for step, loss in found), flush=True)

    prompt = torch.tensor([tokenizer.encode("def main(")[: options.length // 2]]).to(trainer.model_wrapped.device)
    with torch.no_grad():
        written = trainer.model_wrapped.module.generate(prompt, max_new_tokens=24, do_sample=False, pad_token_id=0)
    if trainer.is_world_process_zero():
        print("continued:", repr(tokenizer.decode(written[0].tolist())))


if __name__ == "__main__":
    main()
