"""docs/config.md and docs/errors.md say what the code says, about every key and every error."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from lazytrain_ds import errors, reference
from lazytrain_ds.config import EXCLUDED, LazyTrainConfig
from lazytrain_ds.rewrite import LIMITS


@pytest.mark.parametrize("name", ["config.md", "errors.md"])
def test_the_page_is_current(repository: Path, name: str) -> None:
    written = (repository / "docs" / name).read_text()
    assert written == reference.render()[name], "run python -m lazytrain_ds.reference"


def test_every_key_has_words_and_no_other() -> None:
    nested = {"planner": "kind solver time_limit gap", "profile": "cache_dir refresh"}
    keys = [name for name in LazyTrainConfig.model_fields if name not in nested]
    keys += [f"{section}.{key}" for section, names in nested.items() for key in names.split()]
    assert sorted(reference.KEYS) == sorted(keys) == sorted(reference.key_names())
    assert all(all(words) for words in reference.KEYS.values())


def test_every_error_has_words_and_no_other() -> None:
    classes = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, errors.LazyTrainError) and value is not errors.LazyTrainError
    ]
    assert sorted(reference.ERRORS) == sorted(classes) == sorted(reference.error_names())


def test_what_is_replaced_and_refused_is_listed() -> None:
    page = reference.render()["config.md"]
    for name, _, why in LIMITS:
        assert name in page and why in page
    for key, why in EXCLUDED.items():
        assert f"| `{key}` | {why} |" in page


def test_values_that_the_page_offers_are_accepted() -> None:
    for key, words in reference.KEYS.items():
        if not words.values.startswith('`"'):
            continue
        values = [value.strip('`"') for value in words.values.split(", ")]
        for value in values:
            section, _, name = key.rpartition(".")
            block = {section: {name: value}} if section else {name: value}
            LazyTrainConfig.parse(block)


def test_it_writes_both_pages(monkeypatch, tmp_path, capsys) -> None:
    (tmp_path / "docs").mkdir()
    monkeypatch.setattr(reference, "__file__", str(tmp_path / "lazytrain_ds" / "reference.py"))
    reference.main()
    assert {path.name for path in (tmp_path / "docs").iterdir()} == {"config.md", "errors.md"}
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(reference, "__file__", str(tmp_path / "elsewhere" / "x" / "reference.py"))
    with pytest.raises(SystemExit, match="run this from a checkout"):
        reference.main()
