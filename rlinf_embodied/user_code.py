"""Where code of the user's raised: a plug-in's mistake is shown by its own lines, without the frames that called it."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf_embodied.errors import RlinfError

_ROOT = Path(__file__).resolve().parent.parent
_OURS = tuple(_ROOT / name for name in ("rlinf_embodied", "envs", "policies", "experiments"))
_EXAMPLES = _ROOT / "experiments/examples"  # they are what a user would write
_LIBRARIES = tuple(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SHOWN = 5  # frames


def raised_by_user(error: BaseException) -> str | None:
    """Returns what was raised and the user's lines that led there, None where none of them did.

    For example "KeyError: 'proprio', from\n  /home/me/my_mlp.py, line 41, in value: return self.critic(...)".
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_user(frame.filename)]
    if not frames:
        return None
    lines = [f"  {frame.filename}, line {frame.lineno}, in {frame.name}: {frame.line}" for frame in frames[-_SHOWN:]]
    return "\n".join([f"{type(error).__name__}: {error}, from", *lines])


@contextmanager
def named_when_raised(refusal: Callable[[str], RlinfError]) -> Iterator[None]:
    """Answers what the user's code raises in the block with an error of ours; what we raise there stays as it is.

    Args:
        refusal: makes the error of the text of `raised_by_user`.

    Raises:
        RlinfError: the user's code raised.
    """
    try:
        yield
    except RlinfError:
        raise
    except Exception as error:
        told = raised_by_user(error)
        if told is None:
            raise
        raise refusal(told) from error


def _is_of_user(filename: str) -> bool:
    path = Path(filename).resolve()
    if not path.is_file() or path.is_relative_to(_EXAMPLES):
        return path.is_file()
    return not any(path.is_relative_to(folder) for folder in (*_OURS, *_LIBRARIES))
