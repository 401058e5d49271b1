"""NvmeStore: named tensors on a local disk, read and written asynchronously, every transfer checked."""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from lazytrain_ds.errors import SwapError, format_bytes
from lazytrain_ds.hardware.swap_path import inspect_swap_path
from lazytrain_ds.runtime.swap.backends import AioSettings, Backend, Kind, ThreadsBackend
from lazytrain_ds.runtime.swap.budget import WriteBudget
from lazytrain_ds.runtime.swap.deepspeed_aio import DeepSpeedAioBackend
from lazytrain_ds.runtime.swap.directory import SwapDirectory
from lazytrain_ds.runtime.swap.entries import Entry, TensorSpec
from lazytrain_ds.runtime.swap.files import CallerTransfer, export_file, load_file, open_source
from lazytrain_ds.runtime.swap.memory import round_up
from lazytrain_ds.runtime.swap.transfers import (
    Channel,
    Ledger,
    OnTransfer,
    Operation,
    Throttle,
    Ticket,
    swap_error,
)

__all__ = ["NvmeStore", "TensorSpec"]

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def _shut_down(pid: int, channels: list[Channel], directory: SwapDirectory, ledger: Ledger | None) -> None:
    """The end of a store: by close, by collection, or at exit."""
    if os.getpid() != pid:
        return  # a forked child: threads, lock and files are the parent's
    if any(channel.owns_current_thread() for channel in channels):
        # A worker collected the store. It cannot join itself.
        threading.Thread(target=_shut_down, args=(pid, channels, directory, ledger)).start()
        return
    if ledger is not None:
        ledger.closing = True
    for channel in channels:
        channel.close()
    for ticket in ledger.unobserved if ledger is not None else []:
        if not ticket._observed:
            logger.warning("closed with a failure that nobody waited for: %s", ticket._error)
    directory.close()


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        logger.warning("NVMe store: %s", message)


class NvmeStore:
    """Named tensors on disk. Scratch: the files end with the store, and a new store starts empty.

    Args:
        directory: the user's `nvme_path`. Files go to `<directory>/lazytrain_swap_<name>` (mode 0700), locked for this
            process; see directory.py. A relative path is made absolute at once.
        name: one per rank that shares `directory`.
        backend: "threads" (preadv/pwritev; works everywhere), "deepspeed_aio" (DeepSpeed's async_io, built if need
            be), or "auto": "threads", which benchmarks/swap_backends.md found to be at least as fast.
        aio: the `aio` block of a DeepSpeed config, for queue depths.
        space_limit_bytes: refuse to hold more than this on disk (padded). None: the free space is the limit.
        reserve_bytes: refuse at start if the disk (or the limit) has less than this.
        write_budget_bytes_per_day: refuse to write more than this, padded, within 24 hours from the store's start, and
            again in each 24 hours after; said once when 90 % are used. None: no limit.
        create: whether a missing `directory` is created.
        on_transfer, throttle: see transfers.py.

    A tensor is written and read whole, keeps its dtype and element count, and is padded on disk to the disk's block.
    Transfers of one key keep their order: a read sees the last write handed in before it, and a write waits for the
    reads handed in before it. Different keys go in any order, reads and writes at once. A write replaces the key's
    content in place; what must outlive a write (a checkpoint) is taken out with `export` first. After a failed write
    the key has no content.

    Memory that starts on a multiple of `memory_alignment_bytes` (`aligned_empty`) is moved without a copy; other memory
    goes through bounce buffers, `staging_limit_bytes` at most altogether. Tensors must be contiguous and on the CPU.

    Methods may be called from any thread, not from a forked child. Raises SwapError throughout.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        name: str = "rank0",
        backend: Literal["auto", "threads", "deepspeed_aio"] = "auto",
        aio: Mapping[str, Any] | None = None,
        space_limit_bytes: int | None = None,
        reserve_bytes: int = 0,
        write_budget_bytes_per_day: int | None = None,
        create: bool = True,
        on_transfer: OnTransfer | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        if backend not in ("auto", "threads", "deepspeed_aio"):
            raise SwapError(f'NVMe store: no back end {backend!r}; use "auto", "threads" or "deepspeed_aio"')
        self.report = inspect_swap_path(directory, create=create)
        if self.report.problem:
            raise SwapError(f"NVMe store: {self.report.problem}")
        for warning in self.report.warnings:
            _warn_once(warning)
        self.settings = AioSettings.from_deepspeed(dict(aio) if aio else None)
        self._space_limit_bytes = space_limit_bytes
        self._write_budget = WriteBudget(write_budget_bytes_per_day)
        self._occupied_bytes = 0
        self._entries: dict[str, Entry] = {}
        self._pid = os.getpid()
        self._closed = False
        self._directory = SwapDirectory.open(self.report.path, name=name, create=create)
        channels: list[Channel] = []
        try:
            self._ledger = Ledger(self._directory.free_bytes, on_transfer, throttle)
            self._require_space(reserve_bytes, "the run")
            direct_io = self.report.direct_io
            self.memory_alignment_bytes = direct_io.memory_alignment_bytes
            self._length_alignment_bytes = direct_io.length_alignment_bytes
            self._backend: Backend
            if backend == "deepspeed_aio":
                self._backend = DeepSpeedAioBackend(direct_io, self.settings)
            else:
                self._backend = ThreadsBackend(direct_io)
            for kind in ("read", "write"):
                channels.append(Channel(kind, self._backend, self.settings.threads, self._ledger))
            self._read_channel, self._write_channel = channels
        except BaseException:
            _shut_down(self._pid, channels, self._directory, None)
            raise
        # A finalizer rather than __del__: it knows nothing of the store, so the store can be collected. At interpreter
        # exit it has to run before the directory's own clean-up (registered earlier, so run later), or a worker would
        # still write into a directory that is given up already.
        self._finalizer = weakref.finalize(self, _shut_down, self._pid, channels, self._directory, self._ledger)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)

    # What there is

    @property
    def directory(self) -> Path:
        """Where the files are (a directory of our own below the user's)."""
        return self._directory.root

    @property
    def backend(self) -> str:
        """Name of the back end in use."""
        return self._backend.name

    @property
    def capacity_bytes(self) -> int:
        """Bytes that the store adds to host memory: 0 where its files are host memory themselves (tmpfs)."""
        free = self.report.capacity_bytes
        return free if self._space_limit_bytes is None else min(free, self._space_limit_bytes)

    @property
    def occupied_bytes(self) -> int:
        """Bytes allocated on disk, padding included."""
        return self._occupied_bytes

    @property
    def staging_limit_bytes(self) -> int:
        """Most host memory the bounce buffers can take; they exist only once unaligned memory was moved."""
        return 2 * self.settings.threads * round_up(self.settings.request_bytes, 4096)

    @property
    def bytes_read(self) -> int:
        """Payload bytes of all finished reads."""
        return self._ledger.payload_bytes["read"]

    @property
    def bytes_written(self) -> int:
        """Payload bytes of all finished writes."""
        return self._ledger.payload_bytes["write"]

    @property
    def disk_bytes_read(self) -> int:
        """Bytes the disk delivered, padding included: what the kernel counts as read_bytes."""
        return self._ledger.disk_bytes["read"]

    @property
    def disk_bytes_written(self) -> int:
        """Bytes the disk took, padding included: what the kernel counts as write_bytes."""
        return self._ledger.disk_bytes["write"]

    @property
    def disk_bytes_written_per_day(self) -> float:
        """`disk_bytes_written` at the rate of the store's life so far, for 24 hours: what wears the SSD."""
        return self._write_budget.per_day(self.disk_bytes_written)

    def padded_bytes(self, payload_bytes: int) -> int:
        """Bytes on disk for a tensor of `payload_bytes`."""
        return round_up(payload_bytes, self._length_alignment_bytes)

    def __contains__(self, key: str) -> bool:
        entry = self._entries.get(key)
        return entry is not None and entry.spec is not None

    def keys(self) -> list[str]:
        """Keys that were written, in the order of their first write or reservation."""
        with self._ledger.lock:
            return [key for key, entry in self._entries.items() if entry.spec is not None]

    # Space

    def reserve(self, tensors: Mapping[str, TensorSpec]) -> None:
        """Allocate the files of all `tensors` now, so that a disk too full is refused before training.

        Raises SwapError, with need and have, and then removes the new files again.
        """
        with self._ledger.lock:
            self._check_usable()
            padded = {key: self.padded_bytes(spec.payload_bytes) for key, spec in tensors.items()}
            known = {key: self._entries[key].capacity_bytes for key in padded if key in self._entries}
            self._require_space(
                sum(max(0, size - known.get(key, 0)) for key, size in padded.items()), f"{len(padded)} tensors"
            )
            before = set(self._entries)
            try:
                for key, size in padded.items():
                    self._make_room(key, size)
            except SwapError:
                for key in set(self._entries) - before:
                    self._remove_file(self._entries.pop(key))
                raise

    def _require_space(self, need_bytes: int, what: str) -> None:
        free = self._directory.free_bytes()
        if need_bytes > free:
            raise SwapError(
                f"NVMe store: {what} need {format_bytes(need_bytes)} ({need_bytes} bytes) in {self.directory}, but its "
                f"file system has {format_bytes(free)} ({free} bytes) free. Free space there, or set nvme_path to "
                "a larger disk."
            )
        limit = self._space_limit_bytes
        if limit is not None and self._occupied_bytes + need_bytes > limit:
            raise SwapError(
                f"NVMe store: {what} need {format_bytes(self._occupied_bytes + need_bytes)} in {self.directory}, more "
                f"than nvme_space allows ({format_bytes(limit)}, {limit} bytes). Raise nvme_space."
            )

    def _make_room(self, key: str, padded_bytes: int) -> Entry:
        """The entry of `key` with a file of at least `padded_bytes`. Call with the lock held."""
        entry = self._entries.get(key)
        fresh = entry is None
        if entry is None:
            entry = Entry(key, self._directory.new_path())
        growth = padded_bytes - entry.capacity_bytes
        if growth > 0 or fresh:
            self._require_space(max(0, growth), f"{key!r}")
            self._allocate(entry, padded_bytes, fresh)
            self._occupied_bytes += max(0, growth)
            entry.capacity_bytes = max(entry.capacity_bytes, padded_bytes)
        self._entries[key] = entry
        return entry

    def _allocate(self, entry: Entry, padded_bytes: int, fresh: bool) -> None:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if fresh else 0)
        try:
            descriptor = os.open(entry.path, flags, 0o600)
            try:
                if padded_bytes:
                    try:
                        os.posix_fallocate(descriptor, 0, padded_bytes)
                    except OSError as error:
                        # No fallocate there: the statvfs check above has to do.
                        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                            raise
                        os.ftruncate(descriptor, padded_bytes)
            except BaseException:
                if fresh:
                    os.unlink(entry.path)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise swap_error(
                f"allocating {padded_bytes} bytes for {entry.key!r}", entry.path, error, padded_bytes, 0,
                self._directory.free_bytes(),
            ) from error  # fmt: skip

    def _remove_file(self, entry: Entry) -> None:
        self._occupied_bytes -= entry.capacity_bytes
        try:
            os.unlink(entry.path)
        except FileNotFoundError:
            pass

    # Transfers

    def write(self, key: str, tensor: torch.Tensor) -> Ticket:
        """Start writing `tensor` under `key`, replacing what was there. Leave it unchanged until the ticket is done.

        Refusals (space, budget, a tensor that is not contiguous or not on the CPU) raise here, the disk's errors at
        the ticket.
        """
        self._check_tensor(tensor, "write", key)
        spec = TensorSpec(tensor.dtype, tensor.numel())
        with self._ledger.lock:
            self._check_usable()
            operation, earlier = self._prepare_write(key, spec, tensor, None)
            self._ledger.submit(operation, earlier)
        return operation.ticket

    def read(self, key: str, out: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Start reading `key` into `out`, which has the dtype and element count that was written (any shape).

        `after`: transfers that must have ended, well or not, before `out` may be overwritten (a write from it).

        Raises at once if nothing was written under `key` or `out` does not match; the disk's errors come at the ticket,
        also the one of a write of `key` that failed.
        """
        self._check_tensor(out, "read", key)
        with self._ledger.lock:
            self._check_usable()
            entry, spec = self._written(key)
            if (out.dtype, out.numel()) != (spec.dtype, spec.numel):
                raise SwapError(
                    f"NVMe store: {key!r} holds {spec.numel} x {spec.dtype}, but the tensor to read into is "
                    f"{out.numel()} x {out.dtype}"
                )
            operation = self._operation("read", entry, spec, out, None)
            self._submit_read(entry, operation, [each._operation for each in after if each._operation is not None])
        return operation.ticket

    def delete(self, key: str) -> None:
        """Forget `key` and free its space, after the transfers under way on it. Unknown keys are an error."""
        with self._ledger.lock:
            self._check_usable()
            entry = self._entries.get(key)
            if entry is None:
                raise SwapError(f"NVMe store: no tensor {key!r} to delete")
            del self._entries[key]
            pending = [*entry.reads, *([entry.last_write] if entry.last_write else [])]
        for operation in pending:
            operation.ticket._finished.wait()
        with self._ledger.lock:
            self._remove_file(entry)

    def synchronize(self) -> None:
        """Wait for everything handed in so far. Raises the first failure that nobody has seen yet."""
        with self._ledger.lock:
            operations = [
                operation
                for entry in self._entries.values()
                for operation in (*entry.reads, entry.last_write)
                if operation is not None
            ]
        for operation in operations:
            operation.ticket._finished.wait()
        with self._ledger.lock:
            failed = [ticket for ticket in self._ledger.unobserved if not ticket._observed]
            self._ledger.unobserved = []
        for ticket in failed[:1]:
            ticket.wait()

    # Files that outlive the store (checkpoints)

    def export(self, key: str, path: str | os.PathLike[str]) -> int:
        """Copy the content of `key` to the file `path`: raw bytes, no padding, atomically, on disk when this returns.

        Takes one request of memory, whatever the tensor's size. Writes of `key` handed in later wait until it is done.
        An existing `path` is replaced only when all went well. Returns the bytes written.
        """
        with self._ledger.lock:
            self._check_usable()
            entry, spec = self._written(key)
            transfer = CallerTransfer(self._ledger, self._backend)
            operation = transfer.operation = self._operation("read", entry, spec, None, transfer.start)
            self._submit_read(entry, operation)
        export_file(transfer, Path(os.path.abspath(path)))
        return spec.payload_bytes

    def mapped(self, key: str) -> torch.Tensor:
        """The content of `key` as a flat tensor mapped from its file: for reading through once (a checkpoint).

        Takes no memory of its own. Valid until `key` is written, deleted or the store is closed; do not write to it.
        """
        with self._ledger.lock:
            self._check_usable()
            entry, spec = self._written(key)
            last_write = entry.last_write
        if last_write is not None:
            last_write.ticket.wait()
        if not spec.numel:
            return torch.empty(0, dtype=spec.dtype)
        return torch.from_file(str(entry.path), shared=False, size=spec.numel, dtype=spec.dtype)

    def load(self, key: str, path: str | os.PathLike[str], spec: TensorSpec) -> None:
        """The way back: make the file `path` (raw bytes, as `export` wrote it) the content of `key`.

        Takes one request of memory, whatever the tensor's size. The file must have exactly the size of `spec`.
        """
        source = Path(os.path.abspath(path))
        with open_source(source, spec.payload_bytes, f"{spec.numel} x {spec.dtype}") as descriptor:
            with self._ledger.lock:
                self._check_usable()
                transfer = CallerTransfer(self._ledger, self._backend)
                transfer.operation, earlier = self._prepare_write(key, spec, None, transfer.start)
                self._ledger.submit(transfer.operation, earlier)
            load_file(transfer, descriptor, source)

    # The end

    def close(self) -> None:
        """Stop transfers (queued ones fail), join the threads, remove the files, give up the lock. Idempotent."""
        self._closed = True
        self._finalizer()
        atexit.unregister(self._finalizer)

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Details

    def _check_usable(self) -> None:
        if self._closed:
            raise SwapError("NVMe store: closed")
        if os.getpid() != self._pid:
            raise SwapError(
                f"NVMe store: opened by process {self._pid}, and process {os.getpid()} is a fork of it; "
                "open a store of its own with another name"
            )

    @staticmethod
    def _check_tensor(tensor: torch.Tensor, action: str, key: str) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_contiguous():
            raise SwapError(
                f"NVMe store: {action} of {key!r} needs a contiguous CPU tensor, got {tensor.layout} on {tensor.device}"
                f"{'' if tensor.layout != torch.strided else f' with strides {tuple(tensor.stride())}'}"
            )

    def _written(self, key: str) -> tuple[Entry, TensorSpec]:
        entry = self._entries.get(key)
        if entry is None or entry.spec is None:
            raise SwapError(f"NVMe store: nothing was written under {key!r}")
        return entry, entry.spec

    def _operation(
        self,
        kind: Kind,
        entry: Entry,
        spec: TensorSpec,
        tensor: torch.Tensor | None,
        start: Callable[[Operation], None] | None,
    ) -> Operation:
        channel = self._read_channel if kind == "read" else self._write_channel
        payload = spec.payload_bytes
        return Operation(
            Ticket(kind, entry.key, payload, self.padded_bytes(payload)),
            entry.path,
            (tensor.data_ptr() if tensor is not None else 0, payload),
            tensor,
            direct=tensor is not None and self._backend.takes_directly(tensor),
            request_bytes=self.settings.request_bytes,
            length_alignment_bytes=self._length_alignment_bytes,
            on_ready=start or channel.push,
            by_caller=start is not None,
        )

    def _prepare_write(
        self, key: str, spec: TensorSpec, tensor: torch.Tensor | None, start: Callable[[Operation], None] | None
    ) -> tuple[Operation, list[Operation]]:
        padded = self.padded_bytes(spec.payload_bytes)
        self._write_budget.check(padded, key)
        entry = self._make_room(key, padded)
        self._write_budget.spend(padded)
        operation = self._operation("write", entry, spec, tensor, start)
        earlier = [*entry.reads, *([entry.last_write] if entry.last_write else [])]
        entry.spec, entry.last_write, entry.reads = spec, operation, []
        return operation, earlier

    def _submit_read(self, entry: Entry, operation: Operation, after: Sequence[Operation] = ()) -> None:
        operation.source = entry.last_write
        entry.reads = [read for read in entry.reads if not read.ended]
        entry.reads.append(operation)
        self._ledger.submit(operation, [*after, *([entry.last_write] if entry.last_write else [])])
