"""Reading the config of a call exactly as DeepSpeed reads it: messy files included."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

from lazytrain_ds.runtime.arguments import configs_hidden, given_config, read_config

MESSY = {
    "plain": b'{"lazytrain": {"sequence_length": 8}, "bf16": {"enabled": true}}',
    "comments and trailing commas": b'{ // c\n  "lazytrain": {}, # d\n /* e */ "steps_per_print": 1e5,\n}\n',
    "unquoted keys": b"{\n  lazytrain: {\n    device_memory: 70GB\n  }\n}",
    "single quotes": b"{'lazytrain': {'blocks': 'a.*'}}",
    "leading blank line and tabs": b'\n\t{"lazytrain":\tnull}',
    "byte order mark": b'\xef\xbb\xbf{"lazytrain": true}',
    "no root braces": b"lazytrain: {}\nsteps_per_print: 3\n",
    "list as block": b'{"lazytrain": []}',
    "duplicate block": b'{"lazytrain": {}, "lazytrain": null}',
    "duplicate nested key": b'{"lazytrain": {"blocks": "a", "blocks": "b"}}',
    "duplicate elsewhere": b'{"lazytrain": {}, "aio": {"a": 1, "a": 2}}',
    "empty": b"",
    "broken": b'{"lazytrain": {',
    "latin-1": '{"_comment": "é", "lazytrain": {}}'.encode("latin-1"),
}


def outcome(read: Any, source: object) -> object:
    try:
        return read(source)
    except Exception:
        return "an error"


@pytest.mark.parametrize("name", MESSY)
def test_files_are_read_as_deepspeed_reads_them(tmp_path: Path, name: str) -> None:
    path = tmp_path / "ds.conf"
    path.write_bytes(MESSY[name])
    assert outcome(read_config, str(path)) == outcome(load_ds_config, str(path))
    assert outcome(read_config, path) == outcome(read_config, str(path))


@pytest.mark.parametrize("text", [*MESSY.values(), b"[1, 2]"])
def test_base64_is_read_as_deepspeed_reads_it(text: bytes) -> None:
    encoded = base64.urlsafe_b64encode(text).decode()
    theirs = outcome(load_ds_config, encoded)
    assert outcome(read_config, encoded) == (theirs if isinstance(theirs, dict) else "an error")


@pytest.mark.parametrize("source", ["no/such/file.json", "ds_config", ".", None, 3, b"{}", ["x"]])
def test_what_is_not_a_config_is_an_error(source: object) -> None:
    assert outcome(read_config, source) == outcome(load_ds_config, source) == "an error"


def test_a_dict_is_itself() -> None:
    config: dict[str, Any] = {}
    assert read_config(config) is config


@pytest.mark.parametrize(
    ("bound", "expected"),
    [
        ({}, None),
        ({"config": "a"}, "a"),
        ({"config_params": "b"}, "b"),
        ({"config": "a", "config_params": "b"}, "a"),
        ({"args": SimpleNamespace(deepspeed_config="c")}, "c"),
        ({"args": SimpleNamespace(deepscale_config="d", deepspeed_config=None)}, "d"),
        ({"args": SimpleNamespace(deepspeed_config=None), "config": "a"}, "a"),
        ({"args": SimpleNamespace(deepspeed_config="c"), "config": "a"}, None),
        ({"args": SimpleNamespace(deepscale_config="d", deepspeed_config="c")}, None),
        ({"args": object()}, None),
    ],
)
def test_which_config_was_given(bound: dict[str, Any], expected: object) -> None:
    assert given_config(bound) == expected


def test_hidden_configs_come_back_even_after_an_error() -> None:
    args = SimpleNamespace(deepspeed_config="c", local_rank=-1)
    with pytest.raises(RuntimeError), configs_hidden(args):
        assert args.deepspeed_config is None
        args.local_rank = 0
        raise RuntimeError
    assert vars(args) == {"deepspeed_config": "c", "local_rank": 0}
