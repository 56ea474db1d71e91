"""Every command of the README, the docs and the Makefile is one that the scripts take as it is printed.

Commands that train or measure for minutes are composed, which checks every group, key, value and combination; of the
rest the script must be there.  What they compute is run, reduced, by the tests of each script.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rlinf_embodied.compose import (
    compose,
    compose_answers,
    compose_evaluate,
    compose_export,
    compose_math,
    compose_serve_env,
    compose_train,
)
from rlinf_embodied.config import EmulationConfig, PlanningConfig, ServeConfig
from rlinf_embodied.embodied.starting_point import require_start

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "Makefile", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"python (experiments/[\w/]+\.py)((?: +(?:'[^']*'|[^\s`'#|)]+))*)")
LEFT_TO_THE_READER = ("<", "...", "$(")  # in an argument: no command as it stands


def commands() -> Iterator[tuple[str, str, str]]:
    """Yields (page, script, arguments), each pair of the last two once."""
    seen = set()
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for script, arguments in COMMAND.findall(text):
            command = (script, " ".join(arguments.split()).rstrip(",;:."))
            if command not in seen and not any(sign in command[1] for sign in LEFT_TO_THE_READER):
                seen.add(command)
                yield (str(page.relative_to(ROOT)), *command)


def evaluation(overrides: list[str]) -> object:
    return compose_answers(overrides) or compose_evaluate(overrides)


def training(overrides: list[str]) -> object:
    config = compose_train(overrides)
    require_start(config)
    return config


COMPOSERS: dict[str, Callable[[list[str]], object]] = {
    "experiments/train_vla.py": training,
    "experiments/export_dataset.py": compose_export,
    "experiments/train_llm_math.py": compose_math,
    "experiments/evaluate.py": evaluation,
    "experiments/serve_policy.py": lambda words: compose(ServeConfig, words),
    "experiments/serve_env.py": compose_serve_env,
    "experiments/plan.py": lambda words: compose(PlanningConfig, words),
    "experiments/emulate.py": lambda words: compose(EmulationConfig, words),
}
DOCUMENTED = list(commands())


def composer(script: str, overrides: list[str]) -> Callable[[list[str]], object] | None:
    if script == "experiments/profile_stages.py":
        return compose_math if "workflow=reasoning" in overrides else training
    return COMPOSERS.get(script)


@pytest.fixture
def as_after_the_demo(tmp_path, monkeypatch) -> Callable[[str], str]:
    """Puts what the demo leaves behind where a command finds it; the working directory is the repository's."""
    monkeypatch.chdir(ROOT)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"name": "collocated", "num_devices": 1, "items": ["env+policy on 0"]}))
    sections = {"workflow": "reasoning", "data": {}, "policy": {}, "generation": {}, "reward": {}}
    (tmp_path / "evaluation.json").write_text(json.dumps(sections))
    there = {
        "plan=runs/demo/plan.json": f"plan={plan}",
        "checkpoint=runs/math/checkpoints/latest": f"checkpoint={tmp_path}",
        "checkpoint=models/qwen": f"checkpoint={tmp_path}",
    }
    return lambda word: there.get(word, word)


@pytest.mark.parametrize(("page", "script", "arguments"), DOCUMENTED, ids=lambda text: text or "-")
def test_a_documented_command_is_taken(as_after_the_demo, page: str, script: str, arguments: str) -> None:
    assert (ROOT / script).is_file(), f"{page} names {script}"
    overrides = [as_after_the_demo(word) for word in shlex.split(arguments)]
    compose = composer(script, overrides)
    if compose is not None and "--help" not in overrides:
        compose([text for text in overrides if text != "workflow=reasoning"])


def test_the_commands_of_the_readme_are_found() -> None:
    printed = re.findall(r"`python experiments/[^`]+`", (ROOT / "README.md").read_text())
    assert len(printed) >= 10
    found = {f"`python {script} {arguments}`" for page, script, arguments in DOCUMENTED if page == "README.md"}
    assert set(printed) <= found


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for link in (link for link in links if not link.startswith(("http", "#"))):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve()
        assert target.exists(), f"{page.name} links to {link}"
        if anchor and target.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
            assert anchor in slugs, f"{page.name} links to {link}"
