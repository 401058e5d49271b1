"""`lazytrain`: questions about a training run before, and tools around it. Heavy imports wait until a command runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from lazytrain_ds import __version__
from lazytrain_ds.errors import LazyTrainError

BAD_INPUT = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lazytrain", description=__doc__)
    parser.add_argument("--version", action="version", version=f"lazytrain-ds {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    plan = commands.add_parser(
        "plan",
        help="will it fit, how fast, and what is in the way",
        description="Plan a run without a GPU and without weights. Exit status: 0 it fits, 3 it does not, 2 bad input.",
    )
    plan.add_argument("config", help="DeepSpeed JSON config")
    plan.add_argument(
        "--model", required=True, metavar="M", help="HF config.json, a directory with one, or module:function"
    )
    plan.add_argument("--seq-len", type=int, metavar="S", help="tokens per sample")
    machine = plan.add_mutually_exclusive_group()
    machine.add_argument(
        "--hardware", metavar="NAME", help="a preset, for example h100-sxm; see lazytrain probe --list"
    )
    machine.add_argument(
        "--probe", action="store_true", help="measure this machine anew (default: measured once, cached)"
    )
    plan.add_argument("--device-memory", metavar="SIZE", help='cap, for example "70GB"')
    plan.add_argument("--host-memory", metavar="SIZE", help="cap")
    plan.add_argument("--nvme-space", metavar="SIZE", help="cap")
    plan.add_argument("--micro-batch", metavar="N", help='a number, or "auto": the planner chooses, global batch kept')
    plan.add_argument("--global-batch", type=int, metavar="N", help="samples per optimizer step")
    plan.add_argument("--json", metavar="FILE", help="write plan, instance and figures there")

    probe = commands.add_parser("probe", help="measure this machine", description="Measure this machine.")
    probe.add_argument("--nvme-path", metavar="DIR", help="also measure this directory")
    probe.add_argument("--seconds", type=float, default=0.5, metavar="S", help="time per measurement (0.5)")
    probe.add_argument("--list", action="store_true", help="list the presets and their sources instead")
    probe.add_argument("--json", metavar="FILE", help="write the figures there")

    doctor = commands.add_parser(
        "doctor",
        help="find what is missing on this machine",
        description="Check versions, compilers, memory limits, swap directories. Exit status 1 if something is wrong.",
    )
    doctor.add_argument("--nvme-path", metavar="DIR", help="check this swap directory")
    doctor.add_argument("--clean", action="store_true", help="remove swap files that no process uses any more")
    doctor.add_argument("--bundle", metavar="FILE", help="write what a bug report needs (a .zip, without secrets)")
    doctor.add_argument("--config", metavar="FILE", help="add this config to the bundle (names and paths are kept)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status (2 for bad input, said on stderr)."""
    arguments = _parser().parse_args(argv)
    module = importlib.import_module(f"lazytrain_ds.commands.{arguments.command}")
    try:
        status: int = module.run(arguments)
        return status
    except LazyTrainError as error:
        print(f"lazytrain: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 0


if __name__ == "__main__":
    sys.exit(main())
