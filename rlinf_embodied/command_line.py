"""What every command does around its work: read the command line, print help or the resolved config, exit truly.

Exit codes: 0 done, 1 the work failed, 2 the input was wrong; 130, 143 stopped by Ctrl-C, SIGTERM.
"""

from __future__ import annotations

import errno
import inspect
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, NoReturn, TypeVar, cast, get_type_hints

from rlinf_embodied import errors
from rlinf_embodied.compose import choices, compose, groups, pin, to_yaml
from rlinf_embodied.config import Exactness, ProfiledConfig, RunConfig
from rlinf_embodied.runtime.stop_signals import Stopped, ends_at_once

STARTED = time.time()  # of the command: imports count
USAGE_ERRORS = errors.ConfigError, errors.DataError, errors.PlanError, errors.CheckpointError, errors.SimulatorError
FAULTS = (  # the work failed; of usage errors the input was wrong
    *(errors.CheckpointWriteError, errors.ObjectiveError, errors.RunFileError),
    *(errors.PlugInError, errors.SimulatorCallError, errors.ServerError),
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_Config = TypeVar("_Config")


def main(
    work: Callable[[_Config], object],
    schema: type[_Config] | type,
    composer: Callable[[Sequence[str]], _Config] | None = None,
    words: Sequence[str] | None = None,
) -> NoReturn:
    """Composes the config from the command line, runs `work` with it and exits; see the module for the exit codes.

    Args:
        work: returns an exit code, or something else for 0; it imports what is heavy.
        schema: a dataclass whose keys the help lists: the config, or its own part of the words.
        composer: makes the config of the command's words; None: `compose` does.
        words: None: those of `sys.argv`.
    """
    words = sys.argv[1:] if words is None else list(words)
    if {"-h", "--help"} & set(words):
        print_only(help_text(schema))
    try:
        with ends_at_once():
            config = composer(words) if composer else cast(_Config, compose(schema, words))
            run = getattr(config, "run", None)
            if isinstance(run, RunConfig):
                if run.dry:
                    print_only(to_yaml(config).rstrip())
                _pin_if_possible(config, words)
            code = work(config)
            sys.exit(code if isinstance(code, int) else 0)
    except (*USAGE_ERRORS, *FAULTS) as error:
        _exit(f"error: {error}", 2 if isinstance(error, USAGE_ERRORS) else 1)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        action = "free space on the disks of run.dir, the cache and temporary files, then give the same command again"
        _exit(f"error: {error.filename or 'a file'} cannot be written ({error.strerror}): {action}", 1)
    except KeyboardInterrupt as error:
        stop = error if isinstance(error, Stopped) else Stopped(signal.SIGINT)
        _exit(str(stop), stop.exit_code)


def print_only(text: str) -> NoReturn:
    """Prints what was asked for and exits."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a reader such as head has left; Python would complain once more as it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def _exit(message: str, code: int) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(code)


def _pin_if_possible(config: Any, words: Sequence[str]) -> None:
    """Pins the process; if that is impossible and run.exact is not among the words, sets it to `exact`."""
    try:
        if not isinstance(config, ProfiledConfig):  # plans and emulations compute no weights
            pin(config)
    except errors.ConfigError as error:
        if any(text.startswith("run.exact=") for text in words):
            raise
        print(f"note: {error} (this run does so)", file=sys.stderr)
        config.run.exact = Exactness.exact


def help_text(schema: type) -> str:
    """Returns what a script is for, its groups with their presets, and all keys with their defaults and meanings."""
    script = sys.modules["__main__"]
    listed = groups(schema)
    lines = [(script.__doc__ or "").strip(), ""]
    lines += ["groups, each a preset or a .yaml file:"] if listed else []
    lines += [
        f"  {name + '=' + preset.default:<24}{' | '.join(choices(name, schema))}" for name, preset in listed.items()
    ]
    lines += ["", "keys with their defaults (run.dry=true prints what they come to):" if listed else "keys:"]
    return "\n".join([*lines, *_key_lines(schema, "")])


def _key_lines(schema: type, prefix: str) -> list[str]:
    """Returns a line for each key: its default, and the comment behind it in the source."""
    sources = "".join(inspect.getsource(one) for one in schema.__mro__ if is_dataclass(one))
    comments = dict(re.findall(r"^    (\w+): [^#\n]*?#\s*(.*)$", sources, re.MULTILINE))
    kinds, lines = get_type_hints(schema), []
    for entry in fields(schema):
        kind = kinds[entry.name]
        if is_dataclass(kind):
            lines += _key_lines(cast(type, kind), f"{prefix}{entry.name}.")
            continue
        default: Any = entry.default_factory() if entry.default_factory is not MISSING else entry.default
        shown = "<value>" if default is MISSING else default.value if isinstance(default, Enum) else json.dumps(default)
        lines.append(f"  {f'{prefix}{entry.name}={shown.strip(chr(34))}':<46}{comments.get(entry.name, '')}".rstrip())
    return lines
