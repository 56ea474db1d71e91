"""Writes one self-contained HTML page about a run, or one that compares several runs.

python experiments/report.py run.dir=runs/demo
python experiments/report.py runs=runs/seed0,runs/seed1 out=runs/compared.html videos_mb=4

A run may be in progress or interrupted; the page lists what is missing.  Nothing in a run folder is changed, except
report.html if there is one run and `out` is not given.
"""

from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied.command_line import main
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.reporting.page import page
from rlinf_embodied.telemetry.run_reader import read_run


@dataclass(slots=True, kw_only=True)
class Folder:
    """A run."""

    dir: str = ""  # a run folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The page that is asked for."""

    run: Folder = field(default_factory=Folder)
    runs: str = ""  # several run folders, joined by commas
    out: str = ""  # "": report.html in the folder of a single run
    videos_mb: float = 12.0  # megabytes of all videos inside the page; 0: no videos


def report(options: Options) -> Path:
    folders = [Path(name) for name in [options.run.dir, *options.runs.split(",")] if name]
    if not folders:
        raise ConfigError("run.dir is not given, but the page is of a run: give run.dir=<run folder>, or runs=<a>,<b>")
    if len(folders) > 1 and not options.out:
        raise ConfigError("out is not given, but the page is of several runs: give out=<file>.html")
    text = page([read_run(folder) for folder in folders], int(options.videos_mb * 1e6))
    out = Path(options.out) if options.out else folders[0] / "report.html"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"out is {str(out)!r}, but it cannot be written ({error.strerror}): give out=<file>.html elsewhere"
        ) from error
    print(f"{out} ({len(text) / 1e6:.1f} MB)")
    return out


if __name__ == "__main__":
    main(report, Options)
