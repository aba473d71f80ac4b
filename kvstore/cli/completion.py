"""``kvstore completion``: prints a shell's completion script, made from the command's own parser.

shtab makes such scripts too, but those offer no flags after ``config`` and ``check``, at the price of a dependency.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvstore.cli.namespace_choice import NAMESPACE

_FILES = ("FILE", "DIR", "PATH", "TRACE")
"""What stands for a file in a flag's help."""
_FISH_NAMESPACES = '(command kvstore _namespaces (commandline -cp) " " 2>/dev/null)'
"""Fish quotes what it is given, and leaves out what does not fit."""


@dataclass(slots=True)
class Command:
    """One command: its flags, arguments and subcommands; ``kvstore`` itself is one."""

    path: tuple[str, ...]
    help: str = ""
    flags: dict[str, argparse.Action] = field(default_factory=dict)
    takes_files: bool = False
    """Whether an argument without a flag is a file."""
    takes_namespace: bool = False
    """Whether the first argument without a flag is a namespace, which the node is asked for."""
    subcommands: list[Command] = field(default_factory=list)

    def all(self) -> Iterator[Command]:
        """This one, its subcommands, and theirs."""
        yield self
        for each in self.subcommands:
            yield from each.all()


def add_to(commands: argparse._SubParsersAction[Any], parser: argparse.ArgumentParser) -> None:
    """The command's flags. ``parser``: the one that knows all commands, once they are added."""
    completion = commands.add_parser(
        "completion",
        help="print the completion script for a shell",
        description="Print the completion script for a shell.",
        epilog='examples:\n  eval "$(kvstore completion bash)"                  in ~/.bashrc\n'
        '  eval "$(kvstore completion zsh)"                   in ~/.zshrc, after compinit\n'
        "  kvstore completion fish > ~/.config/fish/completions/kvstore.fish",
    )
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))
    completion.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print it."""
    root = commands_of(parser, (parser.prog,))
    print({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](root))
    return 0


def commands_of(parser: argparse.ArgumentParser, path: tuple[str, ...], text: str = "") -> Command:
    """The command of a parser, with its subcommands."""
    command = Command(path, text)
    for action in parser._actions:  # noqa: SLF001 - argparse shows it nowhere else
        for flag in action.option_strings:
            command.flags[flag] = action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            helps = {each.dest: each.help or "" for each in action._choices_actions}  # noqa: SLF001
            for name, subparser in action.choices.items():
                command.subcommands.append(commands_of(subparser, (*path, name), helps.get(name, "")))
        elif not action.option_strings:
            command.takes_files |= action.metavar in _FILES
            command.takes_namespace |= action.metavar == NAMESPACE
            if action.choices is not None:
                command.subcommands += [Command((*path, str(choice))) for choice in action.choices]
    return command


def _takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


def _values(action: argparse.Action) -> str:
    """The values that a flag may have, in words; empty where they are files, or anybody's."""
    return " ".join(map(str, action.choices or ()))


def bash(root: Command) -> str:
    """A completion function for bash, which needs no other package."""
    every = list(root.all())
    deeper = "|".join(_quoted(each.path) for each in every if len(each.path) > 1)
    lines = [
        "_kvstore_namespaces() {",
        "    local line",
        '    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(',
        '        command kvstore _namespaces "${COMP_LINE:0:COMP_POINT}" "${COMP_WORDBREAKS-}" 2>/dev/null)',
        "}",
        "_kvstore() {",
        '    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} path=kvstore words="" i',
        "    COMPREPLY=()",
        "    for ((i = 1; i < COMP_CWORD; i++)); do",
        f'        case "$path ${{COMP_WORDS[i]}}" in {deeper}) path="$path ${{COMP_WORDS[i]}}" ;; esac',
        "    done",
        '    case "$path $prev" in',
    ]
    files: list[str] = []
    none: list[str] = []
    for each in every:
        for flag, action in each.flags.items():
            place = _quoted((*each.path, flag))
            if values := _values(action):
                reply = f'COMPREPLY=($(compgen -W {shlex.quote(values)} -- "$cur"))'
                lines.append(f"        {place}) {reply}; return ;;")
            elif action.metavar == NAMESPACE:
                lines.append(f"        {place}) _kvstore_namespaces; return ;;")
            elif _takes_value(action):
                (files if action.metavar in _FILES else none).append(place)
    if files:
        lines.append(f'        {"|".join(files)}) compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur")); return ;;')
    if none:
        lines.append(f"        {'|'.join(none)}) return ;;")
    lines += ["    esac", '    case "$path" in']
    for each in every:
        words = [one.path[-1] for one in each.subcommands] + sorted(each.flags)
        take = ' compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur"));' if each.takes_files else ""
        ask = ' [[ "$cur" == -* ]] || _kvstore_namespaces;' if each.takes_namespace else ""
        lines.append(f"        {_quoted(each.path)}) words={shlex.quote(' '.join(words))};{take}{ask} ;;")
    lines += [
        "    esac",
        '    COMPREPLY+=($(compgen -W "$words" -- "$cur"))',
        "}",
        "complete -F _kvstore kvstore",
    ]
    return "\n".join(lines)


def zsh(root: Command) -> str:
    """The same for zsh, which understands bash's."""
    compopt = "(( $+functions[compopt] )) || compopt() { :; }"
    return f"autoload -U +X bashcompinit && bashcompinit\n{compopt}\n{bash(root)}"


def fish(root: Command) -> str:
    """Rules for fish."""
    lines = ["complete -c kvstore -f"]
    for each in root.all():
        seen = [f"__fish_seen_subcommand_from {name}" for name in each.path[1:]]
        names = " ".join(one.path[-1] for one in each.subcommands)
        at = "; and ".join([*seen, *([f"not __fish_seen_subcommand_from {names}"] if names else [])]) or "true"
        lines += [
            f"complete -c kvstore -n {_fish(at)} -a {_fish(one.path[-1])} -d {_fish(one.help)}"
            for one in each.subcommands
        ]
        if each.takes_files:
            lines.append(f"complete -c kvstore -n {_fish(at)} -F")
        if each.takes_namespace:
            lines.append(f"complete -c kvstore -n {_fish(at)} -a {_fish(_FISH_NAMESPACES)}")
        for flag, action in each.flags.items():
            name = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
            value = ""
            if values := _values(action):
                value = f" -x -a {_fish(values)}"
            elif action.metavar == NAMESPACE:
                value = f" -x -a {_fish(_FISH_NAMESPACES)}"
            elif _takes_value(action):
                value = " -r -F" if action.metavar in _FILES else " -x"
            text = (action.help or "").partition("(default")[0].strip() if action.help != argparse.SUPPRESS else ""
            lines.append(f"complete -c kvstore -n {_fish(at)} {name}{value} -d {_fish(text)}")
    return "\n".join(lines)


def _quoted(words: tuple[str, ...]) -> str:
    return '"' + " ".join(words) + '"'


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
