"""Between the store and ordinary files (checkpoints): one request of memory at a time, atomic on the outside."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from lazytrain_ds.errors import SwapError
from lazytrain_ds.hardware.swap_path import errno_name
from lazytrain_ds.runtime.swap.backends import Backend
from lazytrain_ds.runtime.swap.memory import memory_view, round_up
from lazytrain_ds.runtime.swap.transfers import Ledger, Operation, swap_error

__all__ = ["CallerTransfer", "export_file", "load_file", "open_source"]


class CallerTransfer:
    """An operation that takes its turn like any other, but is moved by the thread that asked for it, piece by piece.

    Use as a context manager: entering waits for the turn, leaving books the end (with the error, if there is one).
    """

    operation: Operation

    def __init__(self, ledger: Ledger, backend: Backend) -> None:
        self._ledger = ledger
        self._backend = backend
        self._turn = threading.Event()

    def start(self, operation: Operation) -> None:
        """It is the operation's turn (called by the ledger)."""
        self._turn.set()

    def __enter__(self) -> CallerTransfer:
        operation = self.operation
        try:
            self._turn.wait()
        except BaseException:
            self._give_up_turn()
            raise
        source = operation.source
        if source is not None and source.error is not None:
            operation.fail(
                SwapError(f"NVMe store: {operation.ticket.key!r} has no valid content, its last write failed")
            )
        try:
            if operation.error is not None:
                raise operation.error from (source.error if source is not None else None)
            self._worker = self._backend.worker()
        except BaseException as error:
            self._end(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._worker.close()
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        operation = self.operation
        if error is not None:
            operation.fail(error if isinstance(error, SwapError) else SwapError(f"NVMe store: interrupted: {error!r}"))
            operation.ticket._observed = True  # the caller gets it
        operation.close_file(self._backend)
        self._ledger.finish(operation)

    def _give_up_turn(self) -> None:
        # Interrupted (Ctrl-C) while waiting: who comes after still has to get its turn.
        with self._ledger.lock:
            self.operation.fail(SwapError("NVMe store: interrupted while waiting"))
            self.operation.ticket._observed = True
            waiting = not self._turn.is_set()
            if waiting:
                self.operation.on_ready = self._ledger.finish
        if not waiting:
            self._ledger.finish(self.operation)

    def read_pieces(self) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes without padding) of each request, in order. A piece is valid until the next one."""
        for offset, size, bounce, payload in self._requests():
            self._move("read", offset, size, bounce)
            yield offset, memory_view(bounce, payload)

    def write_pieces(self) -> Iterator[tuple[int, memoryview]]:
        """(offset, memory to fill) of each request, in order; written once the next one is asked for."""
        for offset, size, bounce, payload in self._requests():
            yield offset, memory_view(bounce, payload)
            memory_view(bounce + payload, size - payload)[:] = bytes(size - payload)
            self._move("write", offset, size, bounce)

    def _requests(self) -> Iterator[tuple[int, int, int, int]]:
        operation = self.operation
        total, payload = operation.ticket.disk_bytes, operation.ticket.payload_bytes
        for offset in range(0, total, operation.request_bytes):
            size = min(operation.request_bytes, total - offset)
            bounce, _ = self._worker.staging(round_up(operation.request_bytes, 4096))
            yield offset, size, bounce, min(size, payload - offset)

    def _move(self, kind: str, offset: int, size: int, bounce: int) -> None:
        operation = self.operation
        try:
            operation.move(self._backend, self._worker, [(bounce, size)], offset)
        except OSError as error:
            raise swap_error(
                f"{kind} of {operation.ticket.key!r}", operation.path, error, operation.ticket.disk_bytes,
                operation.done_bytes + getattr(error, "done_bytes", 0), self._ledger.free_bytes(),
            ) from error  # fmt: skip
        operation.done_bytes += size


def export_file(transfer: CallerTransfer, target: Path) -> None:
    """Write what `transfer` reads to `target`: a temporary file beside it, fsync, rename."""
    ticket = transfer.operation.ticket
    with transfer:
        temporary, offset = None, 0
        try:
            descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name[:100]}.", dir=target.parent)
            try:
                for offset, piece in transfer.read_pieces():
                    _write_fully(descriptor, piece, offset)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, target)
            temporary = None
            _sync_directory(target.parent)
        except OSError as error:
            if isinstance(error, SwapError):
                raise
            raise swap_error(
                f"export of {ticket.key!r}", target, error, ticket.payload_bytes, offset, _free_bytes(target.parent)
            ) from error
        finally:
            if temporary is not None:
                os.unlink(temporary)


@contextlib.contextmanager
def open_source(source: Path, size_bytes: int, what: str) -> Iterator[int]:
    """A descriptor of a file that must have exactly `size_bytes` (`what` names the tensor in the refusal)."""
    try:
        descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise SwapError(f"NVMe store: cannot open {source}: {errno_name(error.errno)}") from error
    try:
        have = os.fstat(descriptor).st_size
        if have != size_bytes:
            raise SwapError(
                f"NVMe store: {source} has {have} bytes, but {what} takes {size_bytes}; "
                "the file is cut off or belongs to another tensor"
            )
        yield descriptor
    finally:
        os.close(descriptor)


def load_file(transfer: CallerTransfer, descriptor: int, source: Path) -> None:
    """Fill what `transfer` writes from an open file."""
    with transfer:
        for offset, piece in transfer.write_pieces():
            done = 0
            while done < len(piece):
                try:
                    count = os.preadv(descriptor, [piece[done:]], offset + done)
                    if count == 0:
                        raise OSError(errno.EIO, "the file ends early")
                except OSError as error:
                    raise SwapError(
                        f"NVMe store: reading {source} at {offset + done} failed: {errno_name(error.errno)}"
                    ) from error
                done += count


def _write_fully(descriptor: int, piece: memoryview, offset: int) -> None:
    done = 0
    while done < len(piece):
        count = os.pwrite(descriptor, piece[done:], offset + done)
        if count == 0:
            raise OSError(errno.EIO, "the kernel took no bytes")
        done += count


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_bytes(directory: Path) -> int:
    try:
        space = os.statvfs(directory)
    except OSError:
        return 0
    return space.f_bavail * space.f_frsize
