"""Writes one HTML page of a run, with everything inside it; of several runs, one that compares them.

python experiments/report.py run.dir=runs/demo
python experiments/report.py run.dir=runs/seed0 run.dir=runs/seed1 out=runs/compared.html
python experiments/report.py runs=runs/seed0,runs/seed1 out=runs/compared.html videos_mb=4

A run may be going on or have been interrupted: what is not there yet is said to be missing.  Nothing in a run folder is
touched, but for report.html where `out` is not given and there is one run.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reporting.page import page
from rlinf_embodied.reporting.runs import read_run

KEYS = ("run.dir", "runs", "out", "videos_mb")


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for."""

    folders: tuple[Path, ...]
    out: Path
    videos_mb: float = 12.0  # of all videos inside the page


def parse(words: Sequence[str]) -> Request:
    """Returns what the words of the command line ask for.

    Raises:
        ConfigError: an unknown key, no run, or a wrong value.
    """
    folders: list[Path] = []
    out, videos_mb = "", "12"
    for word in words:
        key, _, value = word.partition("=")
        if key not in KEYS or not value:
            raise ConfigError(f"{word!r} is not understood: give {', '.join(f'{key}=<value>' for key in KEYS)}")
        if key in ("run.dir", "runs"):
            folders += [Path(value)] if key == "run.dir" else [Path(name) for name in value.split(",") if name]
        out, videos_mb = (value if key == "out" else out), (value if key == "videos_mb" else videos_mb)
    if not folders:
        raise ConfigError("run.dir is not given, but the page is of a run: give run.dir=<run folder>, or runs=<a>,<b>")
    if len(folders) > 1 and not out:
        raise ConfigError("out is not given, but the page is of several runs: give out=<file>.html")
    if not videos_mb.replace(".", "", 1).isdigit():
        raise ConfigError(f"videos_mb is {videos_mb!r}, but it is a number of megabytes: use 12, or 0 for no videos")
    return Request(tuple(folders), Path(out) if out else folders[0] / "report.html", float(videos_mb))


def main(words: Sequence[str]) -> None:
    request = parse(words)
    runs = [read_run(folder) for folder in request.folders]
    text = page(runs, int(request.videos_mb * 1e6))
    try:
        request.out.parent.mkdir(parents=True, exist_ok=True)
        request.out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"out is {str(request.out)!r}, but it cannot be written ({error.strerror}): give out=<file>.html elsewhere"
        ) from error
    print(f"{request.out} ({len(text) / 1e6:.1f} MB)")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv) or len(sys.argv) < 2:
        print(__doc__)
        sys.exit(0 if len(sys.argv) > 1 else 2)
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
