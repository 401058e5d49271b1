"""How much may be written to an SSD per day (`nvme_write_budget`)."""

from __future__ import annotations

import logging
import time

from lazytrain_ds.errors import SwapError, format_bytes

__all__ = ["WriteBudget"]

logger = logging.getLogger(__name__)

_SECONDS_PER_DAY = 86_400.0


class WriteBudget:
    """Bytes that may be written per day: an SSD wears out by writing."""

    def __init__(self, bytes_per_day: int | None) -> None:
        self._bytes_per_day = bytes_per_day
        self._day_started = self._started = time.monotonic()
        self._spent_bytes = 0
        self._warned = False

    def per_day(self, written_bytes: int) -> float:
        """`written_bytes` since the start, as bytes per 24 hours at that rate."""
        return written_bytes / max(time.monotonic() - self._started, 1e-9) * _SECONDS_PER_DAY

    def check(self, size_bytes: int, key: str) -> None:
        """SwapError if `size_bytes` more would pass the limit of the current day."""
        limit = self._bytes_per_day
        if limit is None:
            return
        if time.monotonic() - self._day_started >= _SECONDS_PER_DAY:
            self._day_started, self._spent_bytes, self._warned = time.monotonic(), 0, False
        if self._spent_bytes + size_bytes > limit:
            hours = (_SECONDS_PER_DAY - (time.monotonic() - self._day_started)) / 3600
            raise SwapError(
                f"NVMe store: writing {key!r} ({format_bytes(size_bytes)}) would pass nvme_write_budget: "
                f"{format_bytes(self._spent_bytes)} of {format_bytes(limit)} written today, the next day starts in "
                f"{hours:.1f} hours. Raise nvme_write_budget, or give the run more host_memory so that it writes less."
            )

    def spend(self, size_bytes: int) -> None:
        """Count a write that was accepted."""
        self._spent_bytes += size_bytes
        limit = self._bytes_per_day
        if limit is not None and self._spent_bytes > 0.9 * limit and not self._warned:
            self._warned = True
            logger.warning(
                "NVMe store: %s of today's nvme_write_budget of %s are written; the run stops when it is used up",
                format_bytes(self._spent_bytes),
                format_bytes(limit),
            )
