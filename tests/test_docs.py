"""Every command in the docs is run, or names the test that runs it; every link leads somewhere.

A bash block is preceded by `<!-- test: KIND -->`. Blocks of one kind in one document run in order, in a directory that
has the checkout's folders. Kinds: `cheap`; `run` (with run directories at hand); `doctor` (status 1 is fine); `slow`;
`quickstart` and `elsewhere FILE` are run by other tests.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.report.reports import planned, run_directory

PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (REPOSITORY / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^>]*) -->\n)?```bash\n(?P<code>.*?)```", re.DOTALL)
OWN = {"example command", "test command"}  # the README's: run by tests/integration/test_quickstart.py and by .ci/run


def blocks(page: str) -> list[tuple[str, str]]:
    """(mark, commands) of every bash block."""
    text = (REPOSITORY / page).read_text()
    return [(match["mark"] or "", match["code"]) for match in BLOCK.finditer(text)]


def of_kind(*kinds: str) -> list[tuple[str, str]]:
    """(page, kind) wherever a page has such blocks."""
    return [
        (page, kind) for page in PAGES for kind in kinds if any(mark == f"test: {kind}" for mark, _ in blocks(page))
    ]


def run(page: str, kind: str, folder: Path, environment: dict[str, str], fine: tuple[int, ...] = (0,)) -> str:
    for name in ("ds_configs", "examples", "docs", "benchmarks", "lazytrain_ds", "README.md"):
        (folder / name).symlink_to(REPOSITORY / name)
    output = ""
    for mark, code in blocks(page):
        if mark == f"test: {kind}":
            done = subprocess.run(
                ["bash", "-euc", code], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            assert done.returncode in fine, f"{code}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            output += done.stdout
    return output


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_who_runs_it(page: str) -> None:
    for mark, code in blocks(page):
        if mark in OWN and page == "README.md":
            continue
        kind, _, where = mark.removeprefix("test: ").partition(" ")
        assert mark.startswith("test: ") and kind in ("cheap", "run", "doctor", "slow", "quickstart", "elsewhere"), code
        if kind == "elsewhere":
            assert (REPOSITORY / where).is_file()


@pytest.mark.parametrize(("page", "kind"), of_kind("cheap", "doctor"))
def test_cheap_commands(page: str, kind: str, tmp_path: Path, child_environment: dict[str, str]) -> None:
    assert run(page, kind, tmp_path, child_environment, (0, 1) if kind == "doctor" else (0,)) or kind == "cheap"


@pytest.mark.parametrize(("page", "kind"), of_kind("run"))
def test_commands_about_runs(page: str, kind: str, tmp_path: Path, child_environment: dict[str, str]) -> None:
    run_directory(tmp_path / "my_run", planned(), steps=(5, 10))
    run_directory(tmp_path / "other_run", planned(kind="megatrain"))
    assert "measured" in run(page, kind, tmp_path, child_environment)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "kind"), of_kind("slow"))
def test_slow_commands(page: str, kind: str, tmp_path: Path, child_environment: dict[str, str]) -> None:
    assert "What binds" in run(page, kind, tmp_path, child_environment)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    file = REPOSITORY / page
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text()):
        if "://" not in target:
            assert (file.parent / target).exists(), target


def test_the_picture_of_a_planned_step_is_the_one_the_script_draws(tmp_path, child_environment) -> None:
    """As far as matplotlib's version leaves it the same: its words, figures included."""
    drawn = tmp_path / "step.svg"
    command = ["python", str(REPOSITORY / "docs" / "planned_step.py"), "--output", str(drawn)]
    subprocess.run(command, env=child_environment, check=True, capture_output=True)
    words = [re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())
             for path in (drawn, REPOSITORY / "docs" / "planned_step.svg")]  # fmt: skip
    assert words[0] == words[1]
    assert any(word.startswith("predicted:") for word in words[0])


def test_versions_agree() -> None:
    import lazytrain_ds

    found = re.search(r'^version = "(.*)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None and found[1] == lazytrain_ds.__version__
