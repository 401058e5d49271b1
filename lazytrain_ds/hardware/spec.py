"""What a machine can do, as one frozen record: memory per tier, compute, links, SSD, optimizer. Pure data, JSON
both ways.

Rates are *sustained*: what a long run gets, with both link directions busy. Bytes are bytes, rates per second.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from pydantic import ConfigDict

from lazytrain_ds.errors import ConfigError
from lazytrain_ds.planning.instance import Channel, StepDevice
from lazytrain_ds.planning.schema import STRICT, Precision, from_json, require, require_count, require_finite, to_json

HARDWARE_SCHEMA_VERSION = 1

# Bytes that one AdamW update of one parameter moves through memory. fp32 states: read gradient (4), master and two
# moments (12), write the last three (12) and a 16-bit copy (2). 8-bit states: 2 + 2 instead of 8 + 8 for the moments.
UPDATE_BYTES_PER_PARAMETER = {"fp32": 30.0, "8bit": 18.1}

# Master and moments: 4 + 4 + 4; 4 + 1 + 1 and one fp32 scale per 256 elements and moment.
STATE_BYTES_PER_PARAMETER: dict[Precision, float] = {"fp32": 12.0, "8bit": 6.0 + 2 * 4 / 256}


@dataclass(frozen=True)
class OptimizerRate:
    """Measured seconds per parameter of one AdamW update (all threads of the step device together)."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    step_device: StepDevice
    precision: Precision
    seconds_per_parameter: float

    def __post_init__(self) -> None:
        require_finite(self.seconds_per_parameter, "seconds_per_parameter", exclusive=True)


@dataclass(frozen=True)
class HardwareSpec:
    """One device, the host it sits in, and an SSD (`nvme_bytes` 0: none).

    `flops_bf16`, `flops_fp32`: dense matmul rates. `device_bytes_per_second`: device memory bandwidth (read + write).
    `launch_seconds`: fixed cost of one operator. `context_bytes`: device memory gone before any tensor exists.
    `optimizer`: measured update rates; where one is missing it follows from memory bandwidth.
    `measured`: names of the fields that were measured here; the others are from a data sheet or a default.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    name: str
    kind: Literal["cuda", "cpu"]
    device_memory_bytes: int
    flops_bf16: float
    flops_fp32: float
    device_bytes_per_second: float
    h2d: Channel
    d2h: Channel
    nvme_read: Channel
    nvme_write: Channel
    host_memory_bytes: int
    host_bytes_per_second: float
    nvme_bytes: int = 0
    launch_seconds: float = 5e-6
    context_bytes: int = 0
    cores: int = 1
    instruction_set: str = ""
    optimizer: tuple[OptimizerRate, ...] = ()
    measured: tuple[str, ...] = ()
    schema_version: int = HARDWARE_SCHEMA_VERSION

    def __post_init__(self) -> None:
        require(self.schema_version == HARDWARE_SCHEMA_VERSION, "schema_version", f"is {self.schema_version}, not 1")
        for name in ("device_memory_bytes", "host_memory_bytes", "nvme_bytes", "context_bytes"):
            require_count(getattr(self, name), name)
        require_count(self.cores, "cores", 1)
        for name in ("flops_bf16", "flops_fp32", "device_bytes_per_second", "host_bytes_per_second"):
            require_finite(getattr(self, name), name, exclusive=True)
        require_finite(self.launch_seconds, "launch_seconds")

    def flops(self, dtype: str) -> float:
        """Sustained matmul FLOP/s in `dtype` (`"bfloat16"`, `"float16"`, `"float32"`; others count as fp32)."""
        return self.flops_bf16 if dtype in ("bfloat16", "float16") else self.flops_fp32

    def optimizer_seconds(self, step_device: StepDevice, precision: Precision) -> float:
        """Seconds to update one parameter there: measured if it was, else from memory bandwidth."""
        for rate in self.optimizer:
            if rate.step_device == step_device and rate.precision == precision:
                return rate.seconds_per_parameter
        bandwidth = self.device_bytes_per_second if step_device == "device" else self.host_bytes_per_second
        return UPDATE_BYTES_PER_PARAMETER[precision] / bandwidth

    @property
    def host_accumulate_seconds(self) -> float:
        """Seconds to add one fp32 gradient element into the accumulator in host memory (12 bytes moved)."""
        return 12.0 / self.host_bytes_per_second

    def channels(self) -> tuple[Channel, ...]:
        """The transfer channels under the names an Instance wants."""
        return (
            replace(self.h2d, name="h2d"),
            replace(self.d2h, name="d2h"),
            replace(self.nvme_read, name="nvme_read"),
            replace(self.nvme_write, name="nvme_write"),
        )

    def with_memory(
        self, *, device: int | None = None, host: int | None = None, nvme: int | None = None
    ) -> HardwareSpec:
        """The same machine with other capacities (a user's caps); None leaves one as it is."""
        changes = {"device_memory_bytes": device, "host_memory_bytes": host, "nvme_bytes": nvme}
        for name, value in changes.items():
            if value is not None and value < 0:
                raise ConfigError(f"{name}: must not be negative, is {value}")
        return replace(self, **{name: value for name, value in changes.items() if value is not None})

    def to_json(self) -> str:
        """JSON text; `HardwareSpec.from_json` reads it back equal."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> HardwareSpec:
        """Read and validate; SchemaError names field and reason."""
        return from_json(cls, text)
