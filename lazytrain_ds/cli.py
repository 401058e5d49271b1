"""`lazytrain`: questions about a training run before, during and after it, and tools around it.

Exit statuses: 0 answered; 1 `doctor` found something wrong; 2 bad input; 3 the planned run does not fit; 70 an error
inside LazyTrain; 130 interrupted. Heavy imports wait until a command runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from lazytrain_ds import __version__
from lazytrain_ds.errors import LazyTrainError

BAD_INPUT, INTERNAL, INTERRUPTED = 2, 70, 130
STATUSES = "Exit statuses: 0 answered, 1 doctor found something wrong, 2 bad input, 3 the planned run does not fit, "
STATUSES += "70 an error inside LazyTrain, 130 interrupted."


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="write the answer there as JSON; alone: to stdout only"
    )


def _source(command: argparse.ArgumentParser, name: str, metavar: str) -> None:
    command.add_argument(
        name, metavar=metavar, help="a run's report_dir, a file from lazytrain plan --json, or a plan.json"
    )


def make_parser() -> argparse.ArgumentParser:
    """The whole command line, also for completion scripts."""
    parser = argparse.ArgumentParser(
        prog="lazytrain",
        description="Questions about a training run before, during and after it.",
        epilog=STATUSES,
    )
    parser.add_argument("--version", action="version", version=f"lazytrain-ds {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
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
    plan.add_argument(
        "--write-config", metavar="FILE", help="write the config there with the planned batch sizes and this command"
    )
    _json(plan)

    explain = commands.add_parser(
        "explain",
        help="why a plan is as it is, and what would help",
        description="Why each block is where it is, what binds, and what one more GB per tier would buy.",
    )
    _source(explain, "source", "PLAN|RUN_DIR")
    explain.add_argument("--block", type=int, metavar="N", help="one block in detail (0 is the embedding)")
    explain.add_argument("--quick", action="store_true", help="leave out what more memory would buy")
    _json(explain)

    timeline = commands.add_parser(
        "timeline",
        help="predicted over measured: table, picture, trace",
        description="Without --png and --trace both are written: timeline.png and timeline.trace.json.",
    )
    _source(timeline, "source", "PLAN|RUN_DIR")
    timeline.add_argument("--step", type=int, metavar="N", help="the measured step to show (default: the newest)")
    timeline.add_argument("--png", metavar="FILE", help="write the picture there")
    timeline.add_argument("--trace", metavar="FILE", help="write a Chrome/Perfetto trace there")
    _json(timeline)

    compare = commands.add_parser(
        "compare",
        help="two plans or runs side by side",
        description="Time, memory and bytes of two plans or runs, and where their decisions differ.",
    )
    _source(compare, "first", "A")
    _source(compare, "second", "B")
    _json(compare)

    convert = commands.add_parser(
        "convert",
        help="add a lazytrain block to a DeepSpeed config",
        description="What is added, removed and kept, line by line and why; then the new config.",
    )
    convert.add_argument("config", metavar="OLD.json", help="DeepSpeed JSON config")
    convert.add_argument("-o", "--output", metavar="FILE", help="write the new config there")
    convert.add_argument("--force", action="store_true", help="overwrite it")
    _json(convert)

    probe = commands.add_parser("probe", help="measure this machine", description="Measure this machine.")
    probe.add_argument("--nvme-path", metavar="DIR", help="also measure this directory")
    probe.add_argument("--seconds", type=float, default=0.5, metavar="S", help="time per measurement (0.5)")
    probe.add_argument("--list", action="store_true", help="list the presets and their sources instead")
    _json(probe)

    doctor = commands.add_parser(
        "doctor",
        help="find what is missing on this machine",
        description="Check versions, compilers, memory limits, swap directories. Exit status 1 if something is wrong.",
    )
    doctor.add_argument("--nvme-path", metavar="DIR", help="check this swap directory")
    doctor.add_argument("--clean", action="store_true", help="remove swap files that no process uses any more")
    doctor.add_argument("--bundle", metavar="FILE", help="write what a bug report needs (a .zip, without secrets)")
    doctor.add_argument("--config", metavar="FILE", help="add this config to the bundle (names and paths are kept)")
    _json(doctor)

    completion = commands.add_parser(
        "completion",
        help="a script that completes commands and options in your shell",
        description='For bash: eval "$(lazytrain completion bash)" in ~/.bashrc; zsh the same; fish: '
        "lazytrain completion fish > ~/.config/fish/completions/lazytrain.fish",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    for command in commands.choices.values():  # after the command's name as well, without undoing it before
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status. With `--debug` errors are raised instead of said."""
    typed = list(sys.argv[1:] if argv is None else argv)
    arguments = make_parser().parse_args(typed)
    arguments.typed = typed
    try:
        module = importlib.import_module(f"lazytrain_ds.commands.{arguments.command}")
        status: int = module.run(arguments)
        sys.stdout.flush()
        return status
    except LazyTrainError as error:
        if arguments.debug:
            raise
        print(f"lazytrain: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader went away, as `head` does; the interpreter's own flush would complain again
        sys.stdout = None
        return 0
    except Exception as error:
        if arguments.debug:
            raise
        print(
            f"lazytrain: unexpected {type(error).__name__}: {error}\n"
            "This is an error in LazyTrain; --debug shows where, lazytrain doctor --bundle packs what a report needs",
            file=sys.stderr,
        )
        return INTERNAL


if __name__ == "__main__":
    sys.exit(main())
