"""Builds the C++ kernels once, with the system's compiler, and loads them with ctypes.

The library lies in a cache directory under a name made of the sources, the compiler and the flags, so a stale one is
never loaded. It is compiled to a temporary name and renamed: two processes at once both end with a whole file, and a
build that was killed leaves only a temporary file behind. Without a compiler (or with LAZYTRAIN_NO_COMPILER=1)
`load_library` returns None after one warning, and the torch implementation does the work.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

__all__ = ["build_library", "cache_directory", "find_compiler", "load_library"]

SOURCE_DIRECTORY = Path(__file__).parent / "csrc"
MAIN_SOURCE = "lazytrain_optim.cpp"
# -ffp-contract=off is part of the numerics (csrc/common.h); instruction sets are chosen per function, not here.
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
BUILD_TIMEOUT_SECONDS = 600


def cache_directory() -> Path:
    """`$LAZYTRAIN_CACHE_DIR`, else `~/.cache/lazytrain_ds`."""
    return Path(os.environ.get("LAZYTRAIN_CACHE_DIR") or Path.home() / ".cache" / "lazytrain_ds").expanduser()


def find_compiler() -> list[str] | None:
    """The C++ compiler as an argument list: `$CXX` if set, else g++, c++ or clang++; None if there is none."""
    if os.environ.get("LAZYTRAIN_NO_COMPILER", "") not in ("", "0"):
        return None
    candidates = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["g++"], ["c++"], ["clang++"]]
    return next((c for c in candidates if c and shutil.which(c[0])), None)


def _library_name(compiler: list[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False, timeout=60).stdout
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIRECTORY.iterdir()):
        if path.suffix in (".cpp", ".h"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((compiler, version, FLAGS)).encode())
    return f"lazytrain_optim-{digest.hexdigest()[:20]}.so"


def build_library(compiler: list[str], directory: Path) -> Path:
    """Path of the library, compiled if it is not in `directory` yet. Raises RuntimeError with the compiler's words."""
    target = directory / _library_name(compiler)
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, temporary = tempfile.mkstemp(prefix=target.stem + "-", suffix=".tmp", dir=directory)
    os.close(handle)
    try:
        command = [*compiler, *FLAGS, str(SOURCE_DIRECTORY / MAIN_SOURCE), "-o", temporary]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=BUILD_TIMEOUT_SECONDS)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
        os.chmod(temporary, 0o700)
        os.replace(temporary, target)  # atomic; a second builder replaces the file by an equal one
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    return target


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    library.lt_best_isa.argtypes = []
    library.lt_step.argtypes = [pointer, pointer, i32, *[pointer] * 7, i32, pointer, i64, pointer, pointer, i32, i32]
    library.lt_squared_norm.argtypes = [pointer, i32, i64, i32, i32, pointer, pointer]
    library.lt_accumulate.argtypes = [pointer, i32, pointer, i32, i64, i32, i32]
    for name in ("lt_quantize", "lt_dequantize"):
        getattr(library, name).argtypes = [pointer, pointer, pointer, i64, pointer, i32, i32, i32]
    for name in ("lt_best_isa", "lt_step", "lt_squared_norm", "lt_accumulate", "lt_quantize", "lt_dequantize"):
        getattr(library, name).restype = i32
    return library


@functools.lru_cache(maxsize=1)
def load_library() -> ctypes.CDLL | None:
    """The loaded kernels (calls release the GIL), or None after one warning that says why the torch code is used."""
    compiler = find_compiler()
    reason = "no C++ compiler was found (looked for $CXX, g++, c++, clang++)"
    if compiler is not None:
        try:
            return _declare(ctypes.CDLL(str(build_library(compiler, cache_directory()))))
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            reason = str(error)
    warnings.warn(
        f"LazyTrain's CPU optimizer kernels are not available: {reason}. The same steps run through torch operations: "
        "identical results, but dozens of times slower. Install a C++17 compiler, or set CXX and LAZYTRAIN_CACHE_DIR.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None
