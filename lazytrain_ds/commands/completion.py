"""`lazytrain completion`: a script for the user's shell, made from the parser itself, so that it is never out of date.

Files and directories are completed by the shell; commands, options and fixed values by us.
"""

from __future__ import annotations

import argparse
import shlex
from argparse import ArgumentParser, Namespace

__all__ = ["run", "script"]

_BASH = """\
_lazytrain() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="" item words
    for item in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$item" in -*) ;; *) command="$item"; break ;; esac
    done
    case "$command" in
{cases}
        *) words={top} ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    if [[ "$word" != -* && -n "$command" ]]; then
        COMPREPLY+=($(compgen -f -- "$word"))
    fi
}}
complete -o filenames -F _lazytrain lazytrain
"""


def run(arguments: Namespace) -> int:
    """Print the script; 0."""
    print(script(arguments.shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for "bash", "zsh" (through its bash compatibility) or "fish"."""
    from lazytrain_ds.cli import make_parser

    parser = make_parser()
    commands = _commands(parser)
    if shell == "fish":
        return _fish(parser, commands)
    cases = "\n".join(
        f"        {name}) words={shlex.quote(' '.join(_words(command)))} ;;" for name, command in commands.items()
    )
    text = _BASH.format(cases=cases, top=shlex.quote(" ".join([*commands, *_words(parser)])))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if shell == "zsh" else text


def _commands(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _words(parser: ArgumentParser) -> list[str]:
    """Long options and fixed values of a command."""
    words = [option for action in parser._actions for option in action.option_strings if option.startswith("--")]
    for action in parser._actions:
        if not action.option_strings and action.choices and not isinstance(action, argparse._SubParsersAction):
            words += [str(choice) for choice in action.choices]
    return words


def _fish(parser: ArgumentParser, commands: dict[str, ArgumentParser]) -> str:
    helps = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
    lines = [
        f"complete -c lazytrain -n __fish_use_subcommand -f -a {name} -d {shlex.quote(helps.get(name, ''))}"
        for name in commands
    ]
    for name, command in commands.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        for action in command._actions:
            for option in action.option_strings:
                if option.startswith("--"):
                    wants = " -r" if action.nargs != 0 and action.metavar else ""
                    lines.append(
                        f"complete -c lazytrain {seen} -l {option[2:]}{wants} -d {shlex.quote(action.help or '')}"
                    )
            if not action.option_strings and action.choices:
                lines.append(f"complete -c lazytrain {seen} -f -a {shlex.quote(' '.join(map(str, action.choices)))}")
    return "\n".join(lines) + "\n"
