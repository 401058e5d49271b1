"""The command line: answers, exit statuses, refusals; no heavy import for --help."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from lazytrain_ds import cli
from lazytrain_ds.commands import doctor, question
from lazytrain_ds.commands.plan import largest_batch
from lazytrain_ds.config import LazyTrainConfig
from lazytrain_ds.errors import ConfigError, InfeasibleError
from lazytrain_ds.hardware.presets import preset
from lazytrain_ds.planning.instance import Instance
from lazytrain_ds.planning.plan import Plan
from lazytrain_ds.planning.solve import solve

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 688,
    "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 1000, "max_position_embeddings": 128,
    "dtype": "bfloat16",
}  # fmt: skip
DEEPSPEED = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3}, "lazytrain": {},
}  # fmt: skip
MACHINE = ["--hardware", "h100-sxm", "--device-memory", "2GB", "--host-memory", "4GB"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """(config, model) on disk."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    return str(tmp_path / "ds.json"), str(tmp_path / "model")


def plan(files: tuple[str, str], *more: str, machine: list[str] | None = None) -> int:
    return cli.main(["plan", files[0], "--model", files[1], *(MACHINE if machine is None else machine), *more])


def change(file: str, **changes: object) -> None:
    Path(file).write_text(json.dumps({**json.loads(Path(file).read_text()), **changes}))


def test_a_run_that_fits(files, capsys, tmp_path):
    target = tmp_path / "out.json"
    assert plan(files, "--seq-len", "64", "--json", str(target)) == 0
    text = capsys.readouterr().out
    for word in ("load", "initialize", "step", "save", "resume", "LlamaDecoderLayer", "tokens/s", "TFLOPS (6N)",
                 "% of the lower bound", "bottleneck", "what would help most"):  # fmt: skip
        assert word in text, word
    written = json.loads(target.read_text())
    assert written["fits"] is True
    instance = Instance.from_json(json.dumps(written["instance"]))
    made = Plan.from_json(json.dumps(written["plan"]))
    made.check(instance)
    assert (made.micro_batch, made.rounds, instance.sequence_length) == (4, 2, 64)
    assert instance.parameter_count == 2 * 1000 * 256 + 5 * (4 * 256 * 256 + 3 * 256 * 688 + 2 * 256) + 256
    tokens = 8 * 64 / made.prediction.step_seconds
    assert written["speed"]["tokens_per_second"] == pytest.approx(tokens)
    assert written["speed"]["model_flops"] == pytest.approx(6 * instance.parameter_count * tokens)


def test_a_run_that_does_not_fit_says_what_would(files, capsys, tmp_path):
    target = tmp_path / "out.json"
    small = ["--hardware", "h100-sxm", "--device-memory", "2GB", "--host-memory", "20MB"]
    assert plan(files, "--seq-len", "64", "--json", str(target), machine=small) == 3
    text = capsys.readouterr().out
    assert "does not fit" in text
    assert "host: needs" in text
    assert "it fits with host_memory" in text
    written = json.loads(target.read_text())
    assert written["plan"] is None
    assert written["shortages"][0]["tier"] == "host"
    advised = float(written["advice"][0].split("host_memory ")[1].split(" MB")[0]) * 1.01
    enough = ["--hardware", "h100-sxm", "--device-memory", "2GB", "--host-memory", f"{int(advised * 1e6)}"]
    assert plan(files, "--seq-len", "64", machine=enough) == 0


def test_micro_batch_auto_keeps_the_global_batch(files, tmp_path, capsys):
    target = tmp_path / "out.json"
    assert plan(files, "--seq-len", "32", "--micro-batch", "auto", "--json", str(target)) == 0
    written = json.loads(target.read_text())
    assert written["instance"]["micro_batches"] == [1, 2, 4, 8]
    assert written["plan"]["micro_batch"] * written["plan"]["rounds"] == 8
    assert "largest micro-batch that fits: 8" in capsys.readouterr().out


@pytest.mark.slow
def test_largest_batch_is_what_trying_each_gives(files, tmp_path):
    spec = preset("h100-sxm", host_memory_bytes=10**9)
    config = question.read_config_file(files[0])
    sizes, answers = (1, 2, 4, 8), set()
    for device_bytes in (640_000_000, 660_000_000, 700_000_000):
        asked = question.ask(
            config, files[1], spec.with_memory(device=device_bytes), sequence_length=128, micro_batch="auto"
        )
        fits = []
        for size in sizes:
            try:
                solve(replace(asked.instance, micro_batches=(size,)), time_limit_seconds=0.3)
                fits.append(size)
            except InfeasibleError:
                pass
        assert largest_batch(asked) == max(fits, default=None)
        answers.add(max(fits, default=None))
    assert len(answers) > 1


def test_global_batch_of_the_command_line_wins(files, tmp_path):
    target = tmp_path / "out.json"
    assert plan(files, "--seq-len", "32", "--global-batch", "24", "--micro-batch", "3", "--json", str(target)) == 0
    written = json.loads(target.read_text())
    assert (written["plan"]["micro_batch"], written["plan"]["rounds"]) == (3, 8)


def test_nothing_is_left_behind_and_no_weights_are_made(files, tmp_path):
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert plan(files, "--seq-len", "32") == 0
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batch", "3"], "a micro-batch of 3 does not divide the global batch of 8"),
        (["--micro-batch", "many"], "not a whole number"),
        (["--global-batch", "0"], "is not at least 1"),
        (["--device-memory", "lots"], "is not a size"),
        (["--device-memory=-5GB"], "is not a size"),
    ],
)
def test_bad_arguments(files, capsys, arguments, message):
    machine = [item for item in MACHINE if item not in ("--device-memory", "2GB")]
    assert plan(files, *arguments, machine=machine) == 2
    assert message in capsys.readouterr().err


def test_bad_preset_names_the_nearest(files, capsys):
    assert plan(files, machine=["--hardware", "h100"]) == 2
    assert 'did you mean "h100' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("[1]", "holds a list"), ("{'a': ", "cannot be read"), ('{"a": 1, "a": 2}', "duplicate keys")],
)
def test_bad_config_files(files, capsys, text, message):
    Path(files[0]).write_text(text)
    assert plan(files) == 2
    assert message in capsys.readouterr().err


def test_config_that_is_missing_or_a_directory(files, capsys, tmp_path):
    assert plan((str(tmp_path / "none.json"), files[1])) == 2
    assert "there is no file" in capsys.readouterr().err
    assert plan((str(tmp_path), files[1])) == 2
    assert "is a directory" in capsys.readouterr().err


def test_a_byte_order_mark_and_comments_are_read(files):
    Path(files[0]).write_text("\ufeff// mine\n" + json.dumps(DEEPSPEED)[:-1] + ",}", encoding="utf-8")
    assert question.read_config_file(files[0])["train_batch_size"] == 8


def test_contradicting_batch_sizes(files, capsys):
    change(files[0], train_batch_size=7, train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=1)
    assert plan(files) == 2
    assert "train_batch_size (7) must be" in capsys.readouterr().err


def test_other_zero_stages_are_refused(files, capsys):
    change(files[0], zero_optimization={"stage": 2})
    assert plan(files) == 2
    assert "needs ZeRO stage 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere", "nothing is downloaded"),
        ("json:loads", "failed under torch.device"),
        ("os:getcwd", "returned a str, not an nn.Module"),
        ("no_such_module:f", "cannot find"),
    ],
)
def test_bad_models(files, capsys, model, message):
    assert plan((files[0], model)) == 2
    assert message in capsys.readouterr().err


def test_a_directory_without_a_config_and_a_json_that_is_no_model(files, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    assert plan((files[0], str(tmp_path / "empty"))) == 2
    assert "no config.json" in capsys.readouterr().err
    assert plan((files[0], files[0])) == 2
    assert 'no "model_type"' in capsys.readouterr().err


def test_model_from_a_function(files, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_model.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Embedding(50, 64), *(nn.TransformerEncoderLayer(64, 4) for _ in range(3)))\n"
    )
    monkeypatch.chdir(tmp_path)
    assert plan((files[0], "my_model:make"), "--seq-len", "16") == 0
    assert "TransformerEncoderLayer" in capsys.readouterr().out


def test_a_local_nvme_path_that_is_wrong_is_refused_before_anything(files, capsys, tmp_path):
    change(files[0], lazytrain={"nvme_path": str(tmp_path / "ds.json")})
    assert plan(files, machine=[]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_preset_needs_the_size_of_the_ssd(files, capsys, tmp_path):
    change(files[0], lazytrain={"nvme_path": str(tmp_path)})
    assert plan(files) == 2
    assert "give --nvme-space" in capsys.readouterr().err
    assert plan(files, "--nvme-space", "1TB", "--seq-len", "32") == 0


def test_dtypes_and_precisions_follow_the_config():
    assert question.dtype_names({}) == ("float32", "float32")
    assert question.dtype_names({"bf16": {"enabled": True}}) == ("bfloat16", "bfloat16")
    config = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    assert question.dtype_names(config) == ("bfloat16", "float32")
    hybrid = {"optimizer": {"type": "HybridAdamW8bit"}}
    auto = LazyTrainConfig.model_validate({"state_precision": "auto"})
    assert question.precisions_of(hybrid, auto) == ("fp32", "8bit")
    assert question.precisions_of(hybrid, LazyTrainConfig()) == ("8bit",)
    assert question.precisions_of(hybrid, LazyTrainConfig.model_validate({"state_precision": "fp32"})) == ("fp32",)
    assert question.precisions_of({}, auto) == ("fp32",)
    with pytest.raises(ConfigError, match=r"needs .*HybridAdamW8bit"):
        question.precisions_of({}, LazyTrainConfig.model_validate({"state_precision": "8bit"}))


def test_8bit_states_make_a_run_fit_that_fp32_states_do_not(files, capsys, tmp_path):
    target = tmp_path / "out.json"
    machine = ["--hardware", "h100-sxm", "--device-memory", "2GB", "--host-memory", "70MB"]
    assert plan(files, "--seq-len", "32", machine=machine) == 3
    change(files[0], optimizer={"type": "HybridAdamW8bit", "params": {"lr": 1e-3}})
    assert plan(files, "--seq-len", "32", "--json", str(target), machine=machine) == 0
    instance = Instance.from_json(json.dumps(json.loads(target.read_text())["instance"]))
    layer = instance.block_class(1)
    assert layer.quantizable_count == 4 * 256 * 256 + 3 * 256 * 688
    assert instance.block_class(0).quantizable_count == 0


def test_divisors_are_thinned_out():
    assert question.divisors(12) == [1, 2, 3, 4, 6, 12]
    many = question.divisors(720)
    assert len(many) <= 12
    assert all(720 % size == 0 for size in many)
    assert (many[0], many[-1]) == (1, 720)


def test_probe_lists_presets_with_sources(capsys):
    assert cli.main(["probe", "--list"]) == 0
    text = capsys.readouterr().out
    assert "h200" in text
    assert "data sheet" in text


def test_doctor_on_this_machine(capsys, tmp_path):
    bundle, config = tmp_path / "b.zip", tmp_path / "c.json"
    config.write_text(json.dumps({"wandb": {"api_key": "abc123"}, "hub_token": "xyz", "url": "https://me:pw@host/x"}))
    status = cli.main(
        ["doctor", "--nvme-path", str(tmp_path), "--clean", "--bundle", str(bundle), "--config", str(config)]
    )
    text = capsys.readouterr().out
    assert status in (0, 1)
    for word in ("python", "deepspeed", "host memory", "pinned memory", "nvme_path", "nothing to remove"):
        assert word in text
    with zipfile.ZipFile(bundle) as archive:
        content = {name: archive.read(name).decode() for name in archive.namelist()}
    whole = "".join(content.values())
    assert "abc123" not in whole
    assert "xyz" not in whole
    assert "me:pw" not in whole
    assert json.loads(content["environment.json"])["packages"]["torch"]


def test_doctor_says_what_is_wrong(capsys, tmp_path):
    assert cli.main(["doctor", "--nvme-path", str(tmp_path / "a" / "b")]) == 1
    assert "mkdir -p" in capsys.readouterr().out
    assert cli.main(["doctor", "--clean"]) == 2


def test_stale_build_locks(tmp_path):
    lock = tmp_path / "async_io" / "lock"
    lock.parent.mkdir()
    assert [finding.status for finding in doctor.stale_locks(tmp_path)] == ["ok"]
    lock.touch()
    age = lock.stat().st_mtime
    assert doctor.stale_locks(tmp_path, now=age + 5)[0].status == "note"
    late = doctor.stale_locks(tmp_path, now=age + 3600)[0]
    assert late.status == "wrong"
    assert str(lock) in late.text
    assert "delete it" in late.text


def test_an_unsupported_deepspeed_is_found(monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda package: "0.17.0" if package == "deepspeed" else "9.9")
    wrong = [finding for finding in doctor.versions() if finding.status == "wrong"]
    assert [finding.subject for finding in wrong] == ["deepspeed"]
    assert "pip install" in wrong[0].text


def test_a_check_that_fails_is_a_finding(monkeypatch):
    def broken() -> list[doctor.Finding]:
        raise RuntimeError("boom")

    monkeypatch.setattr(doctor, "memory", broken)
    assert any("boom" in finding.text for finding in doctor.examine())


def test_doctor_names_an_offload_that_does_nothing(monkeypatch):
    (finding,) = doctor.activation_offload()
    assert finding.status == "note" and "offloads nothing under ZeRO-3" in finding.text
    monkeypatch.setattr(doctor, "_holds", lambda package, path, text: package == "deepspeed")
    assert doctor.activation_offload() == []


def test_plan_names_a_block_that_a_run_would_not_see(files):
    with pytest.raises(ConfigError, match='inside "zero_optimization"'):
        question.ask(
            {"zero_optimization": {"stage": 3, "lazytrain": {}}}, files[1], preset("h100-sxm", host_memory_bytes=10**9)
        )
    assert '"lazytrian" looks like it misspelt' in question._without_block({"lazytrian": {}})


@pytest.mark.parametrize("length", [0, -5])
def test_a_sequence_without_tokens_is_refused(files, length):
    with pytest.raises(ConfigError, match="--seq-len"):
        question.trace(DEEPSPEED, files[1], sequence_length=length)


def test_a_missing_model_is_said_before_the_machine_is_measured(files, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("lazytrain_ds.hardware.probe.probe", lambda **_: pytest.fail("the machine was measured"))
    assert cli.main(["plan", files[0], "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
