"""HybridAdamW8bit inside stock DeepSpeed, chosen by its name in the config. Each case is one process."""

import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.integration

PRELUDE = """
import copy, json, os, sys, tempfile
import torch
from torch import nn
import deepspeed
from lazytrain_ds.optim.register import register_with_deepspeed
register_with_deepspeed(); register_with_deepspeed()
from lazytrain_ds.errors import LazyTrainError, OptimizerError, UnsupportedError
from lazytrain_ds.optim.hybrid_adamw8bit import HybridAdamW8bit

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(67, 211)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(211), nn.Linear(211, 67), nn.GELU(), nn.Linear(67, 211))
                                     for _ in range(3)])
        self.head = nn.Linear(211, 67, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, tokens):
        x = self.embed(tokens)
        for b in self.blocks:
            x = x + b(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

def build(stage=3, offload="cpu", dtype="bf16", optimizer="HybridAdamW8bit", params=None, zero=None, **extra):
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": 10**9, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "sub_group_size": 20000, "stage3_param_persistence_threshold": 0,
                              **(zero or {})},
        "optimizer": {"type": optimizer, "params": {"lr": 1e-2, "weight_decay": 0.01, **(params or {})}},
        **extra,
    }
    if offload:
        place = {"nvme_path": tempfile.mkdtemp()} if offload == "nvme" else {}
        config["zero_optimization"]["offload_optimizer"] = {"device": offload, "pin_memory": False, **place}
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    net = Net()
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    return engine

def train(engine, steps, start=0, poison=()):
    losses = []
    for step in range(start, start + steps):
        tokens = torch.randint(0, 67, (2, 17), generator=torch.Generator().manual_seed(step))
        loss = engine(tokens)
        engine.backward(loss * float("nan") if step in poison else loss)
        engine.step()
        losses.append(loss.item())
    return losses

def done(**values):
    print("RESULT " + json.dumps(values))
"""


def run(body: str, tmp_path, timeout=300, **env) -> dict:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    script = tmp_path / "case.py"
    script.write_text(PRELUDE + textwrap.dedent(body))
    full = {
        **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **env,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(script)],
        env=full,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-4000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    return {**json.loads(line[7:]), "stderr": done.stderr, "stdout": done.stdout}


def test_zero3_cpu_offload_by_name_without_any_flag(tmp_path):
    got = run(
        """
        engine = build()
        optimizer = engine.optimizer.optimizer
        losses = train(engine, 6)
        flats = engine.optimizer.fp32_partitioned_groups_flat
        layouts = [[(s.offset, s.numel, s.precision) for s in optimizer.layout_of(f).segments] for f in flats]
        kept = optimizer.state_bytes()
        dtypes = sorted({str(v.dtype) for s in optimizer.state.values() for v in s.values()})
        sizes = [[(p.ds_numel, optimizer.precision_of(p)) for p in group] for group in engine.optimizer.fp16_groups]
        done(name=type(optimizer).__name__, losses=losses, layouts=layouts, sizes=sizes, kept=kept, dtypes=dtypes)
        """,
        tmp_path,
    )
    assert got["name"] == "HybridAdamW8bit" and got["losses"][-1] < got["losses"][0]
    # The tied embedding is fp32 wherever it lies; norms and biases too; the Linear weights are 8-bit.
    assert sum(p == "8bit" for group in got["sizes"] for _, p in group) == 6
    for layout, group in zip(got["layouts"], got["sizes"], strict=True):
        assert sum(n for _, n, p in layout if p == "8bit") == sum(n for n, p in group if p == "8bit")
        offset, starts = 0, []
        for n, p in group:
            starts += [(offset, n)] if p == "8bit" else []
            offset += n
        assert [(o, n) for o, n, p in layout if p == "8bit"] == starts
    assert "torch.uint8" in got["dtypes"] and got["kept"]["held"] < 0.6 * got["kept"]["fp32"]
    assert "does not know" not in got["stderr"]


@pytest.mark.parametrize(
    "options",
    ["stage=3, offload=None", "stage=3, dtype='fp32'", "stage=2", "stage=1, offload=None", "stage=0, offload=None"],
)
def test_other_configs(options, tmp_path):
    got = run(
        f"""
        engine = build({options})
        optimizer = engine.basic_optimizer
        losses = train(engine, 4)
        precisions = sorted({{k for s in optimizer.state.values() for k in s}})
        quantized = sum(optimizer.layout_of(p).quantized_numel for p, s in optimizer.state.items() if s)
        done(losses=losses, keys=precisions, quantized=quantized)
        """,
        tmp_path,
    )
    assert got["losses"][-1] < got["losses"][0]
    assert got["quantized"] == 6 * 211 * 67, got  # six Linear weights and nothing else
    assert "does not know" not in got["stderr"]


def test_save_load_continue_is_bit_equal(tmp_path):
    body = """
        engine = build()
        if sys.argv[1:] == [] and os.environ["PHASE"] == "save":
            train(engine, 3)
            engine.save_checkpoint(os.environ["WHERE"])
        else:
            engine.load_checkpoint(os.environ["WHERE"])
        losses = train(engine, 3, start=3)
        states = [engine.optimizer.optimizer.state[f] for f in engine.optimizer.fp32_partitioned_groups_flat]
        done(losses=losses, sums=[float(v.double().sum()) for s in states for k, v in sorted(s.items())],
             dtypes=sorted({str(v.dtype) for s in states for v in s.values()}))
        """
    env = {"WHERE": str(tmp_path / "checkpoint")}
    saved = run(body, tmp_path, PHASE="save", **env)
    loaded = run(body, tmp_path, PHASE="load", **env)
    assert saved["losses"] == loaded["losses"] and saved["sums"] == loaded["sums"]
    assert "torch.uint8" in loaded["dtypes"]


def test_from_and_to_stock_adamw_checkpoints_and_universal(tmp_path):
    got = run(
        """
        where = os.environ["WHERE"]
        stock = build(optimizer="AdamW", params={"torch_adam": True})
        train(stock, 3)
        stock.save_checkpoint(where, tag="stock")
        a = train(stock, 3, start=3)

        ours = build(params={"state_dict_precision": "fp32"})
        ours.load_checkpoint(where, tag="stock")
        b = train(ours, 3, start=3)
        ours.save_checkpoint(where, tag="ours")

        back = build(optimizer="AdamW", params={"torch_adam": True})
        back.load_checkpoint(where, tag="ours")
        c = train(back, 2, start=6)
        d = train(ours, 2, start=6)

        from types import SimpleNamespace
        from deepspeed.checkpoint.ds_to_universal import main
        main(SimpleNamespace(input_folder=where + "/ours", output_folder=where + "/universal", num_extract_workers=1,
                             num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=False))
        with open(where + "/latest_universal", "w") as f:
            f.write("universal")
        open(where + "/latest", "w").write("universal")
        resumed = build(checkpoint={"load_universal": True})
        resumed.load_checkpoint(where, tag="universal")
        e = train(resumed, 2, start=6)
        steps = sorted({float(s["step"]) for s in resumed.optimizer.optimizer.state.values()})
        keys = sorted({k for s in resumed.optimizer.optimizer.state.values() for k in s})
        done(a=a, b=b, c=c, d=d, e=e, steps=steps, keys=keys)
        """,
        tmp_path,
        WHERE=str(tmp_path / "checkpoint"),
    )
    assert got["a"][0] == got["b"][0]  # same parameters
    assert got["a"] == pytest.approx(got["b"], rel=0.02)
    assert got["c"] == pytest.approx(got["d"], rel=0.02) and got["c"][0] == got["d"][0]
    assert got["e"] == pytest.approx(got["d"], rel=0.02) and got["e"][0] == got["d"][0]
    assert got["steps"] == [8.0] and "exp_avg_codes" in got["keys"]


def test_non_finite_gradients_are_skipped_and_three_in_a_row_raise(tmp_path):
    got = run(
        """
        engine = build()
        optimizer = engine.optimizer.optimizer
        train(engine, 2)
        before = [f.detach().clone() for f in engine.optimizer.fp32_partitioned_groups_flat]
        train(engine, 1, start=2, poison=[2])
        unchanged = all(torch.equal(a, b) for a, b in zip(before, engine.optimizer.fp32_partitioned_groups_flat))
        skipped = optimizer.skipped_steps, optimizer.last_step_skipped
        train(engine, 1, start=3)
        row = optimizer.skipped_in_a_row
        try:
            train(engine, 3, start=4, poison=[4, 5, 6])
            message = ""
        except OptimizerError as error:
            message = str(error)
        done(unchanged=unchanged, skipped=skipped, row=row, message=message)
        """,
        tmp_path,
    )
    assert got["unchanged"] and got["skipped"] == [1, True] and got["row"] == 0
    assert "3 steps in a row" in got["message"]


def test_what_cannot_work_is_refused_and_others_are_left_alone(tmp_path):
    got = run(
        """
        from deepspeed.runtime.engine import DeepSpeedEngine
        messages = []
        partial = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
        for options in (dict(offload="nvme"), dict(zero=partial, offload=None)):
            try:
                build(**options)
                messages.append("")
            except UnsupportedError as error:
                messages.append(str(error))
        try:
            build(params={"betas": [0.9]})
        except LazyTrainError as error:
            messages.append(str(error))
        stock = build(optimizer="AdamW", params={"torch_adam": True})
        done(messages=messages, stock=type(stock.optimizer.optimizer).__name__, step="step" in vars(stock.optimizer),
             losses=train(stock, 2))
        """,
        tmp_path,
    )
    assert "NVMe optimizer offload" in got["messages"][0] and 'add a "lazytrain" block' in got["messages"][0]
    assert "offload_optimizer.ratio (0.5)" in got["messages"][1]
    assert "betas is [0.9]" in got["messages"][2]
    assert got["stock"] == "AdamW" and got["step"] is False


def test_importing_register_does_not_import_deepspeed():
    code = "import sys, lazytrain_ds.optim.register; sys.exit('deepspeed' in sys.modules or 'torch' in sys.modules)"
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_trains_where_nothing_can_be_compiled(tmp_path):
    """U70: no compiler: the torch implementation, one warning, no destructor noise, and the same losses."""
    body = "done(losses=train(build(), 2))"
    usual = run(body, tmp_path)
    got = run(body, tmp_path, LAZYTRAIN_NO_COMPILER="1", LAZYTRAIN_CACHE_DIR=str(tmp_path / "cache"))
    assert got["losses"] == usual["losses"] and got["stderr"].count("kernels are not available") == 1
    assert "has no attribute 'ds_opt_adam'" not in got["stderr"]


def test_hugging_face_trainer_fills_auto_values(tmp_path):
    pytest.importorskip("transformers")
    got = run(
        """
        from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        torch.manual_seed(0)
        net = LlamaForCausalLM(LlamaConfig(vocab_size=67, hidden_size=96, intermediate_size=160, num_hidden_layers=2,
                                           num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=32))
        config = {
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
            "bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": "auto",
            "optimizer": {"type": "HybridAdamW8bit",
                          "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        }
        rows = [{"input_ids": (t := torch.randint(0, 67, (16,))), "labels": t} for _ in range(8)]
        args = TrainingArguments(output_dir=tempfile.mkdtemp(), max_steps=3, per_device_train_batch_size=2, bf16=True,
                                 learning_rate=3e-3, weight_decay=0.02, deepspeed=config, report_to=[], use_cpu=True,
                                 save_strategy="no", logging_strategy="no", disable_tqdm=True)
        trainer = Trainer(model=net, args=args, train_dataset=rows)
        trainer.train()
        optimizer = trainer.model_wrapped.optimizer.optimizer
        group = optimizer.param_groups[0]
        done(name=type(optimizer).__name__, decay=group["weight_decay"], betas=group["betas"],
             steps=sorted({float(s["step"]) for s in optimizer.state.values()}),
             quantized=sum(optimizer.layout_of(p).quantized_numel for p in optimizer.state))
        """,
        tmp_path,
        timeout=500,
    )
    assert got["name"] == "HybridAdamW8bit" and got["decay"] == 0.02 and got["betas"] == [0.9, 0.999]
    assert got["steps"] == [3.0]
    assert got["quantized"] == 2 * (4 * 96 * 96 + 3 * 96 * 160) + 67 * 96  # every Linear; the head is not tied here
