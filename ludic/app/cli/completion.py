"""Scripts that complete `ludic` in a shell: commands, options, and the values of options with choices.

eval "$(ludic --completion bash)"     # the same in zsh; in fish: ludic --completion fish | source
"""

from collections.abc import Iterator

from ludic.app.cli.commands import COMMANDS
from ludic.app.cli.settings import settings_of_command
from ludic.settings import ALL, Setting

SHELLS = ("bash", "zsh", "fish")

_BASH = r"""
_ludic() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}" command="${COMP_WORDS[1]:-}" words=""
    if [[ "$word" == "=" ]]; then
        word=""
    elif [[ "$before" == "=" ]]; then
        before="${COMP_WORDS[COMP_CWORD - 2]}"
    fi
    if [[ "$COMP_CWORD" -eq 1 ]]; then
        words="%(commands)s"
    else
        case "$command $before" in
%(choices)s
        esac
        if [[ -z "$words" && "$word" == -* ]]; then
            case "$command" in
%(options)s
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _ludic ludic
"""


def completion(shell: str) -> str:
    """Return the script of a shell of SHELLS."""
    if shell == "fish":
        return "\n".join(_fish())
    script = _bash()
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _options(command: str) -> tuple[Setting, ...]:
    return tuple(each for each in settings_of_command(COMMANDS[command].operation) if each.has_flag)


def _choices(each: Setting) -> list[str]:
    return [str(choice) for choice in each.choices]


def _topics(command: str) -> list[str]:
    return [*dict.fromkeys(each.group for each in _options(command) if each.group), ALL]


def _bash() -> str:
    options, choices = [], []
    for command in COMMANDS:
        flags = ["--help", "--config"]
        for each in _options(command):
            flags += [each.flag, f"--no-{each.flag[2:]}"] if each.is_switch else [each.flag]
            if found := _choices(each):
                choices.append(_case(f"{command} {each.flag}", found))
        options.append(_case(command, flags))
        choices.append(_case(f"{command} --help", _topics(command)))
    return (
        _BASH.lstrip()
        % {
            "commands": " ".join([*COMMANDS, "--help", "--version"]),
            "choices": "\n".join(choices),
            "options": "\n".join(options),
        }
    ).rstrip()


def _case(pattern: str, words: list[str]) -> str:
    return f'                "{pattern}") words="{" ".join(words)}" ;;'


def _fish() -> Iterator[str]:
    for command, operation in COMMANDS.items():
        seen = f"__fish_seen_subcommand_from {command}"
        yield f"complete -c ludic -n __fish_use_subcommand -a {command} -d {_quoted(operation.about)}"
        for each in _options(command):
            value = "" if each.is_switch else " -r"
            words = f" -f -a {_quoted(' '.join(_choices(each)))}" if _choices(each) else ""
            about = each.help.partition(". ")[0].rstrip(".")
            yield f"complete -c ludic -n {_quoted(seen)} -l {each.flag[2:]}{value}{words} -d {_quoted(about)}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
