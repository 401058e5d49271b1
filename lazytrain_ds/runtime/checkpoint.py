"""Checkpoints that do not depend on the plan, need no extra host memory, and are never left half written.

* What is saved is DeepSpeed's own layout: per sub-group the fp32 master and moments, per rank. States on NVMe are
  mapped from the swap file while they are written, so that saving reads them through once and holds nothing.
* Files are written in the zip format, so that a resume maps them and copies sub-group by sub-group.
* A save goes to a directory of its own and takes the tag's name when everything is in it; `latest` is replaced after.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.checkpoint_engine import TorchCheckpointEngine

from lazytrain_ds.errors import PlanError

if TYPE_CHECKING:
    from lazytrain_ds.runtime.layout import SubGroup
    from lazytrain_ds.runtime.stage3 import LazyStage3

__all__ = [
    "MappedCheckpointEngine",
    "committed",
    "exposed_states",
    "load_rigid",
    "load_universal_states",
    "load_universal_weights",
]

FP32_GROUPS = "fp32_flat_groups"
INNER_STATE = "optimizer_state_dict"
UNIVERSAL_MASTER = "fp32"
UNIVERSAL_STATES = (UNIVERSAL_MASTER, "exp_avg", "exp_avg_sq")


class MappedCheckpointEngine(TorchCheckpointEngine):  # type: ignore[misc]
    """torch files that can be mapped instead of read."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.zipfile_serialization = True

    def load(self, path: str, map_location: Any = None) -> Any:
        if map_location in (None, "cpu") or map_location == torch.device("cpu"):
            try:
                return torch.load(path, map_location="cpu", weights_only=False, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise  # not the old format, which cannot be mapped: a real fault of the file
        return super().load(path, map_location)


@contextmanager
def committed(save_dir: str, tag: str, is_writer: bool, barrier: Any) -> Iterator[str]:
    """Gives the tag to save under; afterwards what was saved takes the name `tag`, replacing an older one whole.

    An interruption leaves the older checkpoint or the new one, and at most a directory that ends in `.incomplete`.
    """
    directory = Path(save_dir)
    incomplete = f"{tag}.incomplete"
    if is_writer:
        for leftover in (incomplete, f"{tag}.replaced"):
            shutil.rmtree(directory / leftover, ignore_errors=True)
    barrier()
    yield incomplete
    barrier()
    if is_writer:
        target, replaced = directory / tag, directory / f"{tag}.replaced"
        if target.exists():
            target.rename(replaced)
        (directory / incomplete).rename(target)
        shutil.rmtree(replaced, ignore_errors=True)
    barrier()


def recover(save_dir: str) -> None:
    """After an interruption between the two renames of `committed`: give the older checkpoint its name back."""
    directory = Path(save_dir)
    if not directory.is_dir():
        return
    for replaced in directory.glob("*.replaced"):
        target = replaced.with_suffix("")
        if not target.exists():
            replaced.rename(target)


def write_latest(save_dir: str, tag: str) -> None:
    """Replace the file `latest` in one step."""
    path = Path(save_dir) / "latest"
    temporary = path.with_name("latest.incomplete")
    with open(temporary, "w") as file:
        file.write(tag)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


@contextmanager
def exposed_states(optimizer: LazyStage3) -> Iterator[None]:
    """Masters and the inner optimizer's states are all in place; those on NVMe are mapped for reading."""
    states, inner = optimizer._lt_states, optimizer.optimizer
    own = optimizer.fp32_partitioned_groups_flat
    shown: list[torch.Tensor] = []
    masters = list(own)
    try:
        for index, tier in enumerate(states.tiers):
            if tier == "nvme":
                mapped = states.mapped(index)
                masters[index] = mapped.master
                inner.state[mapped.master] = mapped.state
                shown.append(mapped.master)
        optimizer.fp32_partitioned_groups_flat = masters
        yield
    finally:
        optimizer.fp32_partitioned_groups_flat = own
        for master in shown:
            inner.state.pop(master, None)


def _saved_state_of(saved: dict[str, Any], index: int) -> dict[str, Any]:
    """State of sub-group `index` in an inner optimizer's state dict (sub-groups are numbered as they were saved)."""
    order = [number for group in saved["param_groups"] for number in group["params"]]
    if index >= len(order):
        return {}
    return dict(saved["state"].get(order[index], {}))


def _fill(target: dict[str, Any], saved: dict[str, Any], what: str) -> None:
    for name, value in saved.items():
        mine = target.get(name)
        if torch.is_tensor(mine) and torch.is_tensor(value) and mine.dim() > 0:
            if mine.numel() != value.numel():
                raise PlanError(f"{what}: {name} has {value.numel()} elements in the checkpoint, {mine.numel()} here")
            mine.reshape(-1).copy_(value.reshape(-1))
        elif torch.is_tensor(mine) and torch.is_tensor(value):
            mine.copy_(value)
        elif torch.is_tensor(value):
            target[name] = value.clone()
        else:
            target[name] = value


def load_rigid(optimizer: LazyStage3, saved: dict[str, Any], load_optimizer_states: bool) -> None:
    """Masters, states and low-precision weights from a checkpoint of this rank, one sub-group at a time."""
    masters = saved[FP32_GROUPS]
    layout = optimizer._lt_layout
    if len(masters) != len(layout.sub_groups):
        raise PlanError(
            f"the checkpoint has {len(masters)} sub-groups, this run has {len(layout.sub_groups)}: it was saved with "
            "other blocks or parameter groups. Convert it with DeepSpeed's ds_to_universal and load that."
        )
    inner = saved[INNER_STATE]
    if load_optimizer_states:
        load_hyper_parameters(optimizer, inner["param_groups"])
    for sub_group in layout.sub_groups:
        what = f"sub-group {sub_group.index}"
        with optimizer._lt_states.at_hand(sub_group.index) as states:
            _fill({"master": states.master.detach()}, {"master": masters[sub_group.index].detach()}, what)
            if load_optimizer_states:
                state = _saved_state_of(inner, sub_group.index)
                state = optimizer._lt_updater.convert(state, states.state, sub_group.numel)
                _fill(states.state, state, what)
            with optimizer._lt_homes.open_for_update(sub_group.block, (sub_group,), whole=False) as place:
                place(sub_group).copy_(states.master.detach())
    finish_load(optimizer)


def load_hyper_parameters(optimizer: LazyStage3, saved_groups: list[dict[str, Any]]) -> None:
    """Learning rates and the like, into the inner optimizer's parameter groups."""
    for group, saved in zip(optimizer.optimizer.param_groups, saved_groups, strict=False):
        group.update({name: value for name, value in saved.items() if name != "params"})


def load_universal_states(optimizer: LazyStage3, checkpoint_dir: str) -> None:
    """Masters and moments from a universal checkpoint (DeepSpeed's ds_to_universal), parameter by parameter."""
    directory = Path(checkpoint_dir) / "zero"
    path = directory / "optimizer_state.pt"
    if not path.is_file():
        raise PlanError(f"universal checkpoint: there is no {path}")
    everything = torch.load(path, map_location="cpu", weights_only=False)
    optimizer._load_global_state_stage3(everything)
    inner = everything[INNER_STATE]
    load_hyper_parameters(optimizer, [inner["param_groups"][0]] * len(optimizer.optimizer.param_groups))
    step = inner["state"][0]["step"]
    for sub_group in optimizer._lt_layout.sub_groups:
        with optimizer._lt_states.at_hand(sub_group.index) as states:
            found = {name: _universal(optimizer, directory, sub_group, name) for name in UNIVERSAL_STATES}
            master = found.pop(UNIVERSAL_MASTER)
            states.master.detach().copy_(master)
            state = optimizer._lt_updater.convert({"step": step, **found}, states.state, sub_group.numel)
            _fill(states.state, state, f"sub-group {sub_group.index}")
            with optimizer._lt_homes.open_for_update(sub_group.block, (sub_group,), whole=False) as place:
                place(sub_group).copy_(master)
    finish_load(optimizer)


def load_universal_weights(optimizer: LazyStage3, checkpoint_dir: str, masters_too: bool) -> None:
    """Weights alone from a universal checkpoint; masters become the fp32 ones, or follow the rounded weights."""
    directory = Path(checkpoint_dir) / "zero"
    for sub_group in optimizer._lt_layout.sub_groups:
        master = _universal(optimizer, directory, sub_group, UNIVERSAL_MASTER)
        with optimizer._lt_homes.open_for_update(sub_group.block, (sub_group,), whole=False) as place:
            weights = place(sub_group)
            weights.copy_(master)
            with optimizer._lt_states.at_hand(sub_group.index) as states:
                states.master.detach().copy_(master if masters_too else weights)
    finish_load(optimizer)


def _universal(optimizer: LazyStage3, directory: Path, sub_group: SubGroup, name: str) -> torch.Tensor:
    """One state of a sub-group, flat fp32, put together from the parameters' files."""
    whole = torch.zeros(sub_group.numel, dtype=torch.float32)
    at = 0
    for parameter in sub_group.parameters:
        folder = str(directory / optimizer.param_names[parameter])
        piece = optimizer.load_hp_checkpoint_state(folder, name, param=parameter)
        whole.narrow(0, at, piece.numel()).copy_(piece.reshape(-1))
        at += parameter.partition_numel()
    return whole


def finish_load(optimizer: LazyStage3) -> None:
    """Weights changed behind the parameter store's back: everything is fetched anew."""
    optimizer._lt_states.settle()
    optimizer.lazytrain_weights_changed()
