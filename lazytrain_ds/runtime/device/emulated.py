"""A CPU that behaves like a device behind a link: every byte that would cross takes its wall time on its own channel.

A channel is one thread. A copy starts when its dependencies are done and the channel is free, and ends latency +
bytes / rate later on an ideal clock (so late wake-ups do not add up); the bytes are really copied. Compute is the real
one. What LazyTrain holds "on the device" is counted and capped.

Debug mode: slots given back are filled with NaN and channels wait a random time before each copy, so that a copy or a
read that does not wait for what it must shows as a wrong number.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazytrain_ds.config import parse_size
from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.schema import ChannelName
from lazytrain_ds.planning.timeline import TaskKind
from lazytrain_ds.runtime.device.base import Device, DoneEvent, Event, HostEvent

__all__ = ["EmulatedDevice", "Emulation"]

SPIN_SECONDS = 3e-4  # the last bit of a wait is spun: sleep alone is late by up to 0.15 ms
RATES = ("h2d", "d2h", "nvme_read", "nvme_write")


def parse_rate(value: object, key: str) -> float:
    """Bytes per second from a number or `"400MB/s"`."""
    text = value[:-2] if isinstance(value, str) and value.endswith("/s") else value
    try:
        return float(parse_size(text))
    except ValueError:
        raise ConfigError(f'"lazytrain.device.emulate.{key}": {value!r} is not a rate such as "400MB/s"') from None


@dataclass(frozen=True)
class Emulation:
    """The `emulate` section: capacity in bytes, rates in bytes per second (None: as measured), seconds per transfer."""

    memory_bytes: int
    h2d: float
    d2h: float
    nvme_read: float | None = None
    nvme_write: float | None = None
    latency_seconds: float = 0.0
    debug: bool = False
    seed: int = 0

    @classmethod
    def parse(cls, section: Mapping[str, Any]) -> Emulation:
        """Read and check the section; ConfigError names the key."""
        known = ("memory", *RATES, "latency", "debug", "seed", "compute")
        for key in section:
            if key not in known:
                raise ConfigError(f'"lazytrain.device.emulate.{key}" is not a key; there are {", ".join(known)}')
        for key in ("memory", "h2d", "d2h"):
            if key not in section:
                raise ConfigError(f'"lazytrain.device.emulate" needs {key!r}, for instance "memory": "96MB"')
        if section.get("compute", "real") != "real":
            raise ConfigError('"lazytrain.device.emulate.compute": only "real" is available yet')
        try:
            memory = parse_size(section["memory"])
        except ValueError as error:
            raise ConfigError(f'"lazytrain.device.emulate.memory": {section["memory"]!r} {error}') from None
        rates = {key: parse_rate(section[key], key) for key in RATES if key in section}
        latency, seed = section.get("latency", 0.0), section.get("seed", 0)
        if not isinstance(latency, (int, float)) or latency < 0:
            raise ConfigError(f'"lazytrain.device.emulate.latency": {latency!r} is not a number of seconds')
        return cls(memory, **rates, latency_seconds=float(latency), debug=bool(section.get("debug")), seed=int(seed))


def sleep_until(moment: float) -> None:
    """Wait until `time.perf_counter()` reaches `moment`."""
    while True:
        left = moment - time.perf_counter()
        if left <= 0:
            return
        time.sleep(left - SPIN_SECONDS if left > SPIN_SECONDS else 0)


class _Channel:
    """One direction of the link."""

    def __init__(self, name: ChannelName, rate: float, latency: float, jitter: random.Random | None, report: Any):
        self.name, self.rate, self.latency = name, rate, latency
        self._jitter = jitter
        self._report = report
        self._free_at = 0.0
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"lazytrain-{name}", daemon=True)
        self._thread.start()

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Event],
        task: tuple[TaskKind, int] | None = None,
    ) -> HostEvent:
        done = HostEvent()
        self._jobs.put((target, source, tuple(after), task, done))
        return done

    def _run(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            target, source, after, task, done = job
            try:
                for event in after:
                    event.wait()
                if self._jitter is not None:
                    time.sleep(self._jitter.random() * 2e-3)
                started = max(self._free_at, time.perf_counter())
                byte_count = source.numel() * source.element_size()
                self._free_at = started + self.latency + byte_count / self.rate
                target.copy_(source)
                sleep_until(self._free_at)
                if task is not None:
                    self._report(task, self.name, started, self._free_at, byte_count)
                done.set()
            except BaseException as error:
                done.set(error)
            del job, target, source, after, done

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()


class EmulatedDevice(Device):
    """See the module."""

    name = "emulated"

    def __init__(self, emulation: Emulation) -> None:
        super().__init__(torch.device("cpu"), emulation.memory_bytes, pin_memory=False)
        self.emulation = emulation
        self._channels: dict[str, _Channel] = {}
        for number, (name, rate) in enumerate((("h2d", emulation.h2d), ("d2h", emulation.d2h))):
            jitter = random.Random(emulation.seed * 2 + number) if emulation.debug else None
            self._channels[name] = _Channel(name, rate, emulation.latency_seconds, jitter, self._copied)  # type: ignore[arg-type]

    def _copied(
        self, task: tuple[TaskKind, int], channel: ChannelName, start: float, end: float, byte_count: int
    ) -> None:
        if self.on_copy is not None:
            self.on_copy(*task, channel, start, end, byte_count)

    def available_bytes(self) -> int:
        return self.emulation.memory_bytes - self.ledger.live_bytes

    def copy_async(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        channel: ChannelName,
        after: Sequence[Event] = (),
        task: tuple[TaskKind, int] | None = None,
    ) -> Event:
        return self._channels[channel].copy(target, source, after, task)

    def record(self) -> Event:
        return DoneEvent()  # compute runs in the caller's thread: what was issued has happened

    def compute_waits(self, event: Event) -> float:
        if event.done():
            event.wait()  # raises the error of failed work
            return 0.0
        started = time.perf_counter()
        event.wait()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        for channel in self._channels.values():
            empty = torch.empty(0)
            channel.copy(empty, empty, ()).wait()

    def retire(self, tensor: torch.Tensor) -> None:
        if self.emulation.debug and tensor.is_floating_point():
            tensor.fill_(float("nan"))

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
