"""The house stands as drawn: imports point one way, heavy libraries have one door each."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_embodied.compose import CONFIG_DIR
from rlinf_embodied.planning.profile import load_profile, workflow_for

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("rlinf_embodied", "envs", "policies", "experiments")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
CORE = ("cluster", "planning", "workflow", "learning", "runtime", "execution", "telemetry", "training")
LONGEST_FUNCTION_LINES = 100


def imported_names(path: Path) -> set[str]:
    """Every top-level package that a file imports, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


def importers_of(library: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in SOURCES if library in imported_names(path)]


def loaded_after(statement: str) -> set[str]:
    """Top-level modules of a fresh interpreter after a statement."""
    code = f"import json, sys\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_imports_point_one_way():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def texts(path: Path) -> set[str]:
    """Every string constant of a file but its docstrings."""
    tree = ast.parse(path.read_text())
    bodies = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
    told = {id(node.body[0].value) for node in bodies if node.body and isinstance(node.body[0], ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in told)
    return {node.value for node in constants if isinstance(node.value, str)}


def test_the_core_names_neither_a_workflow_nor_a_stage_of_one():
    profiles = [load_profile(path) for path in (CONFIG_DIR / "profiles").glob("*.json")]
    named = {workflow_for(profile).name for profile in profiles}
    assert named == {"embodied", "reasoning"}
    stages = {stage for profile in profiles for stage in workflow_for(profile).stages}
    stages |= {"prompts", "old_log_probs", "reference", "answers", "fine_tuning", "eval_env", "eval_policy"}
    core = [path for name in CORE for path in sorted((ROOT / "rlinf_embodied" / name).rglob("*.py"))]
    assert len(core) > 50
    found = []
    for path in core:
        for text in texts(path):
            if text in stages or any(f"{package}.{name}" in text for package in PACKAGES for name in named):
                found.append(f"{path.relative_to(ROOT)}: {text!r}")
    assert found == []


@pytest.mark.parametrize(
    ("library", "doors"),
    [
        (
            "ray",
            [
                *(
                    f"rlinf_embodied/runtime/{name}.py"
                    for name in (*("health", "ray_cluster", "ray_session", "ray_worker"),)
                )
            ],
        ),
        ("hydra", ["rlinf_embodied/compose/composition.py"]),
        ("math_verify", ["rlinf_embodied/reasoning/verifier_worker.py"]),
    ],
)
def test_a_heavy_library_has_one_door(library, doors):
    assert importers_of(library) == doors


def test_planning_and_configuration_load_neither_torch_nor_ray_nor_hydra():
    folders = ("rlinf_embodied/planning", "rlinf_embodied/cluster")
    files = [path for folder in folders for path in (ROOT / folder).glob("*.py") if path.stem != "__init__"]
    modules = [str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in files]
    assert modules
    modules += ["rlinf_embodied.config", "rlinf_embodied.errors", "rlinf_embodied.randomness"]
    assert loaded_after("import " + ", ".join(modules)) & {"torch", "ray", "hydra", "omegaconf"} == set()


def test_composition_loads_torch_for_an_algorithm_only_and_once_the_rest_is_right_and_the_process_pinned():
    compose = "from rlinf_embodied import command_line, compose, portable\nassert compose.compose_math([])\n"
    wrong = "try: compose.compose_train(['env.num_env=1'])\nexcept Exception as bad: assert 'num_envs' in str(bad)\n"
    train = "compose.compose_train(['algorithm=grpo'])\nassert portable.is_pinned()"  # torch would not allow it later
    heavy = {"torch", "ray", "transformers", "timm", "mani_skill", "sapien", "gymnasium", "matplotlib"}
    assert loaded_after(compose + wrong) & heavy == set()
    assert loaded_after(compose + train) & heavy == {"torch"}


def test_no_script_shadows_a_module():
    stems = [path.stem for path in (ROOT / "experiments").iterdir() if path.suffix == ".py" or path.is_dir()]
    stems = [stem for stem in stems if not stem.startswith("__")]
    assert {"train_vla", "bench"} <= set(stems)
    # a module of this name that can be found without the folder of the scripts would be hidden by the script
    code = f"import importlib.util as u, json\nprint(json.dumps([s for s in {stems!r} if u.find_spec(s)]))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd="/", check=True)
    assert json.loads(done.stdout) == []


def test_functions_are_short_enough_to_read():
    long = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > LONGEST_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines} lines")
    assert long == []


def test_every_version_is_pinned_without_naming_a_source():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) > 100
    assert [line for line in lines if line.count("==") != 1 or "/" in line or "@" in line] == []
