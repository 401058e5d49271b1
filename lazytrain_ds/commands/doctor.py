"""`lazytrain doctor`: what is missing or in the way on this machine; `--clean` orphans, `--bundle` for a bug report."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lazytrain_ds.errors import ConfigError, format_bytes
from lazytrain_ds.hardware.kernel_builds import build_locks, extensions_directory

Status = Literal["ok", "note", "wrong"]

# A build that holds its lock longer than this is dead (async_io takes about four minutes on two cores).
STALE_LOCK_SECONDS = 600
SUPPORTED_DEEPSPEED = ((0, 19, 8), (0, 20))
_SECRET = re.compile(r"token|secret|passw|api.?key|credential|authorization|cookie", re.IGNORECASE)
# Environment variables that matter and hold no secrets.
_TELLING_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "LAZYTRAIN_AUTOLOAD", "OMP_NUM_THREADS", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCH_EXTENSIONS_DIR", "CUDA_HOME", "CONDA_DEFAULT_ENV",
)  # fmt: skip
_PACKAGES = ("lazytrain-ds", "torch", "deepspeed", "ortools", "bitsandbytes", "py-cpuinfo", "pydantic", "hjson",
             "psutil", "rich", "transformers", "accelerate", "peft", "matplotlib", "ninja", "numpy")  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One check: `wrong` needs action, `note` is good to know."""

    subject: str
    status: Status
    text: str


def run(arguments: Namespace) -> int:
    """Print all findings; 0, or 1 when something is wrong."""
    from lazytrain_ds.report.screen import STDOUT, screen, write_json

    console = screen()
    console.soft_wrap = True
    console.quiet = arguments.json == STDOUT
    findings = examine(arguments.nvme_path)
    if arguments.clean:
        findings += clean(arguments.nvme_path)
    colours = {"ok": "green", "note": "yellow", "wrong": "red"}
    for finding in findings:
        console.print(f"[{colours[finding.status]}]{finding.status:>5}[/]  {finding.subject}: ", end="")
        console.print(finding.text, markup=False)
    if arguments.bundle is not None:
        target = Path(arguments.bundle).expanduser()
        write_bundle(target, findings, arguments.config)
        console.print(f"wrote {target}; look through it before you send it", markup=False)
    write_json(arguments.json, [asdict(finding) for finding in findings])
    return 1 if any(finding.status == "wrong" for finding in findings) else 0


def examine(nvme_path: str | None = None) -> list[Finding]:
    """All checks of this machine; a check that fails itself is a finding, never an exception."""
    checks = [
        versions,
        compilers,
        asynchronous_io,
        lambda: stale_locks(extensions_directory()),
        memory,
        pinning,
        device,
        activation_offload,
    ]
    if nvme_path is not None:
        checks.append(lambda: swap_directory(nvme_path))
    findings: list[Finding] = []
    for check in checks:
        try:
            findings += check()
        except Exception as error:
            findings.append(Finding(getattr(check, "__name__", "check"), "wrong", f"the check itself failed: {error}"))
    return findings


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> list[Finding]:
    """Python and the packages we need, in versions we support."""
    found = [Finding("python", "ok", platform.python_version())]
    for package in ("torch", "deepspeed", "ortools", "bitsandbytes", "py-cpuinfo"):
        version = _version(package)
        if version is None:
            found.append(Finding(package, "wrong", f"not installed; pip install {package}"))
            continue
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
        if package == "deepspeed" and not SUPPORTED_DEEPSPEED[0] <= numbers < SUPPORTED_DEEPSPEED[1]:
            found.append(
                Finding(package, "wrong", f'{version} is not supported; pip install "deepspeed>=0.19.8,<0.20"')
            )
            continue
        found.append(Finding(package, "ok", version))
    return found


def _holds(package: str, path: str, text: str) -> bool:
    """Whether a file of an installed package contains `text`; nothing is imported."""
    spec = importlib.util.find_spec(package)
    for folder in spec.submodule_search_locations or () if spec is not None else ():
        file = Path(folder) / path
        if file.is_file() and text in file.read_text(encoding="utf-8", errors="replace"):
            return True
    return False


def activation_offload() -> list[Finding]:
    """DeepSpeed's own offload of checkpointed activations, which these versions make do nothing, silently."""
    marks_by_id = _holds(
        "deepspeed", "runtime/activation_checkpointing/offload_activations.py", "self._allowed.get(id(tensor)"
    )
    inside_call = _holds("transformers", "modeling_layers.py", "def forward_with_checkpointing(")
    if not (marks_by_id and inside_call):
        return []
    text = (
        "get_checkpoint_hidden_states_offloading_ctx_manager offloads nothing under ZeRO-3 with the installed "
        "transformers: it marks a layer's input by id before ZeRO-3 re-wraps it. LazyTrain's plans offload activations "
        "without it"
    )
    return [Finding("DeepSpeed's activation offload", "note", text)]


def compilers() -> list[Finding]:
    """A C++ compiler and ninja: kernels are built at first use."""
    found = []
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        text = "none found: CPU kernels fall back to slower torch code; install g++"
        found.append(Finding("C++ compiler", "note", text))
    else:
        answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False)
        first = (answer.stdout or answer.stderr).splitlines()
        found.append(Finding("C++ compiler", "ok", first[0] if first else compiler))
    ninja = shutil.which("ninja") or _version("ninja")
    text = "found" if ninja else "not found: torch needs it to build kernels; pip install ninja"
    found.append(Finding("ninja", "ok" if ninja else "note", text))
    return found


def asynchronous_io() -> list[Finding]:
    """libaio, which only DeepSpeed's own file access needs."""
    if ctypes.util.find_library("aio"):
        return [Finding("libaio", "ok", "found")]
    return [Finding("libaio", "note", "not found: NVMe goes through the thread pool, which needs nothing installed")]


def stale_locks(root: Path, *, now: float | None = None) -> list[Finding]:
    """Lock files that an interrupted build left: the next run would wait for ever."""
    found = []
    for lock in build_locks(root):
        age = lock.age_seconds(now)
        if age > STALE_LOCK_SECONDS:
            minutes = f"{age / 60:.0f} minutes old"
            text = f"{lock.path} is {minutes}: unless a build is running, delete it (a run would wait for ever)"
            found.append(Finding("kernel builds", "wrong", text))
        else:
            found.append(Finding("kernel builds", "note", f"{lock.path}: a build seems to be running"))
    return found or [Finding("kernel builds", "ok", f"no lock left in {root}")]


def memory() -> list[Finding]:
    """What is available, and what limits it."""
    from lazytrain_ds.hardware.host_memory import host_memory

    available = host_memory()
    text = f"{format_bytes(available.available_bytes)} available of {format_bytes(available.total_bytes)}"
    found = [Finding("host memory", "ok", f"{text}, limited by {available.source}")]
    return found + [Finding("host memory", "note", note) for note in available.notes]


def pinning() -> list[Finding]:
    """Limits on pinned memory."""
    from lazytrain_ds.hardware.host_memory import pin_limit

    limit = pin_limit()
    if limit.limit_bytes is None:
        return [Finding("pinned memory", "ok", limit.reason)]
    return [Finding("pinned memory", "note", f"at most {format_bytes(limit.limit_bytes)}: {limit.reason}")]


def device() -> list[Finding]:
    """The GPU, if torch can use one."""
    import torch

    if not torch.cuda.is_available():
        built = "this torch is a CPU build" if torch.version.cuda is None else "torch finds no usable driver"
        return [Finding("GPU", "note", f"none: {built}; runs use the CPU")]
    free, total = torch.cuda.mem_get_info()
    name = torch.cuda.get_device_name()
    return [Finding("GPU", "ok", f"{name}, {format_bytes(free)} free of {format_bytes(total)}")]


def swap_directory(path: str) -> list[Finding]:
    """Whether the directory can hold swap files, and what others left there."""
    from lazytrain_ds.hardware.nvme import check_nvme_path
    from lazytrain_ds.runtime.swap import find_orphans

    try:
        checked = check_nvme_path(path)
    except ConfigError as error:
        return [Finding("nvme_path", "wrong", str(error))]
    how = "O_DIRECT" if checked.o_direct else "page cache"
    found = [
        Finding(
            "nvme_path", "ok", f"{checked.path} ({checked.file_system}, {how}), {format_bytes(checked.free_bytes)} free"
        )
    ]
    found += [Finding("nvme_path", "note", warning) for warning in checked.warnings]
    if checked.path.is_dir():
        found += [
            Finding(
                "nvme_path", "note", f"{orphan} was left by a run that is gone; lazytrain doctor --clean removes it"
            )
            for orphan in find_orphans(checked.path)
        ]
    return found


def clean(nvme_path: str | None) -> list[Finding]:
    """Remove swap files of runs that are gone; those of live runs stay."""
    if nvme_path is None:
        raise ConfigError("--clean needs --nvme-path, the directory to clean")
    from lazytrain_ds.runtime.swap import remove_orphans

    removed = remove_orphans(Path(nvme_path).expanduser())
    if not removed:
        return [Finding("clean", "ok", "nothing to remove")]
    return [Finding("clean", "ok", f"removed {_orphan(orphan)}") for orphan in removed]


def _orphan(orphan: Any) -> str:
    return f"{orphan.path} ({orphan.files} files, {format_bytes(orphan.size_bytes)})"


# -- bug reports --


def redact(value: Any, key: str = "") -> Any:
    """A config without secrets: values under telling keys, credentials in URLs and the home directory go."""
    if key and _SECRET.search(key) and not isinstance(value, dict | list):
        return "<removed>"
    if isinstance(value, dict):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [redact(item, key) for item in value]
    if isinstance(value, str):
        text = re.sub(r"://[^/@\s]+@", "://<removed>@", value)
        return text.replace(str(Path.home()), "~") if str(Path.home()) != "/" else text
    return value


def write_bundle(target: Path, findings: Iterable[Finding], config: str | None) -> None:
    """A zip of findings, package versions, memory and processor facts, telling environment variables and the config."""
    environment = {name: redact(os.environ[name]) for name in _TELLING_ENVIRONMENT if name in os.environ}
    lines = [redact(f"{finding.status:>5}  {finding.subject}: {finding.text}") for finding in findings]
    packages = {package: _version(package) for package in _PACKAGES}
    files: dict[str, str] = {
        "doctor.txt": "\n".join(lines) + "\n",
        "environment.json": json.dumps(
            {"python": sys.version, "platform": platform.platform(), "packages": packages, "environment": environment},
            indent=1,
        ),
    }
    for name in ("meminfo", "self/cgroup"):
        try:
            files[f"proc-{name.replace('/', '-')}.txt"] = Path("/proc", name).read_text()
        except OSError:
            continue
    if config is not None:
        from lazytrain_ds.commands.question import read_config_file

        files["config.json"] = json.dumps(redact(read_config_file(config)), indent=1)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    try:
        target.write_bytes(buffer.getvalue())
    except OSError as error:
        raise ConfigError(f"--bundle: cannot write {target}: {error.strerror}") from error


__all__ = ["Finding", "clean", "examine", "redact", "run", "stale_locks", "write_bundle"]
