"""What users run lies at the top of experiments/, and every command that is printed anywhere is one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from conftest import REPOSITORY

EXPERIMENTS = REPOSITORY / "experiments"
SOURCES = sorted(EXPERIMENTS.rglob("*.py"))
TESTS = REPOSITORY / "tests"
CHECKS = [path for folder in (".", "golden", "oracles") for path in sorted((TESTS / folder).glob("*.py"))]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "Makefile", "environment.yml", "constraints.txt")),
    *(REPOSITORY / "docs").rglob("*.md"),
    *TESTS.rglob("*.md"),
    *SOURCES,
    *CHECKS,
]
USED = {
    *("train_vla", "train_llm_math", "evaluate", "export_dataset"),
    *("plan", "emulate", "profile_stages", "report", "check_conventions", "check_dataset", "serve_policy", "serve_env"),
}


def file_of(module: str) -> Path:
    """Returns the file that `python -m <module>` runs."""
    path = REPOSITORY / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def test_only_what_users_run_lies_at_the_top() -> None:
    assert {path.stem for path in EXPERIMENTS.glob("*.py")} == {*USED, "doctor", "chaos", "__init__"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_printed_command_is_one_and_every_named_file_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    modules = set(re.findall(r"python -m ((?:experiments|tests)\.[\w.]+\w)(?![\w.]*[<{])", text))  # but bench.<name>
    modules |= set(re.findall(r"`(experiments\.(?:bench|examples|setup)\.[\w.]*\w)", text))
    missing = [name for name in modules if not file_of(name).exists() or "__main__" not in file_of(name).read_text()]
    named = re.findall(r"\b(?:tests|experiments|configs|rlinf_embodied)/[\w/]+\.(?:py|yaml)\b", text)
    missing += [name for name in named if not (REPOSITORY / name).exists()]
    assert missing == []
