"""What is wrong with a command is said in one line, with what to do, before a worker starts or a file is harmed.

One row per wrong input: the command, its words, and parts that the message must have (the config path with its value or
the file, the rule, the next action).  {name} in a word is one of the places of `places`.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from placements import looped
from runs import tiny, tiny_overrides, train
from scripts import call

from rlinf_embodied.learning import checkpoint

VLA, MATH, EXPORT = "train_vla", "train_llm_math", "export_dataset"
EVALUATE, PLAN, EMULATE = "evaluate", "plan", "emulate"
PATIENCE_S = 20.0  # of processor time: what is imported for a message, whatever else the machine does

# (command, words, parts of the message); what composing a config refuses is in test_config.py
WORDS: list[tuple[str, str, list[str]]] = [
    (VLA, "env._target_=nowhere.make_env", ["env._target_ is 'nowhere.make_env'", "nowhere"]),
    (VLA, "policy.options.num_layers=two", ["policy.options.num_layers is 'two'", "Integer"]),
    (VLA, "policy.options.hidden_size=31", ["hidden_size is 31", "multiple of policy.options.num_heads", "change one"]),
    (VLA, "policy._target_=policies.none.Policy", ["policy._target_ is 'policies.none.Policy'", "policies.none"]),
    (VLA, "env=point_reach env.options.gap=x", ["env.options.gap is 'x'", "PointOptions"]),
    (
        VLA,
        "env._target_=envs.maniskill.make_env env.task=PickCube-v1 env.options.crash=1",
        ["env.options.crash is 1", "use one of backend, control_mode"],
    ),
    (
        VLA,
        "warm_start.checkpoint=/nowhere",
        ["warm_start.checkpoint is '/nowhere'", "config.json", "give a checkpoint folder"],
    ),
    (
        VLA,
        "warm_start.demonstrations=/nowhere.h5",
        ["warm_start.demonstrations is '/nowhere.h5'", "there is nothing", "give a trajectory file"],
    ),
    (VLA, "run.dir=/proc/nowhere", ["run.dir is '/proc/nowhere'", "cannot be written", "use another run.dir"]),
    (MATH, "data.level=sums", ["data.level is 'sums'", "sum"]),
    (MATH, "data.files.all=/nowhere.jsonl policy.folder={run}", ["/nowhere.jsonl"]),
    (MATH, "policy.folder=/nowhere", ["policy.folder is '/nowhere'", "no such folder", "give one"]),
    (
        MATH,
        "algorithm.tokens_per_microbatch=5",
        ["algorithm.tokens_per_microbatch is 5", "the shortest of", "use at least"],
    ),
    (MATH, "reward._target_=nowhere.score", ["reward._target_ is 'nowhere.score'", "nowhere"]),
    (EXPORT, "out={new}.h5 checkpoint=/nowhere", ["checkpoint is '/nowhere'", "give a checkpoint folder"]),
    (VLA, "cluster=local cluster.torch_device=tpu", ["cluster.torch_device is 'tpu'", "give cluster.num_devices"]),
    (VLA, "plan=disaggregated cluster.num_devices=1", ["needs at least 2 devices", "use plan=collocated"]),
    (VLA, "plan=collocated cluster.num_devices=64", ["devices, but there are only 4 blocks", "or fewer devices"]),
    (VLA, "plan={unknown_stage}", ["must place each stage", "remove ['judge']"]),
    (VLA, "plan={beyond}", ["has the devices '0:7'", "a range like '0:1/2'", "correct the plan"]),
    (VLA, "plan={endless}", ["has the devices '0:1e999999999'", "a range like '0:1/2'", "correct the plan"]),
    (VLA, "plan={no_yaml}", ["no valid YAML", "correct the file"]),
    (VLA, "cluster.num_devices=2 plan.profile=/nowhere.json", ["/nowhere.json cannot be read", "path of a profile"]),
    (VLA, "cluster.num_devices=2 plan.profile={no_profile}", ["no_profile.json: format is", "measure it again"]),
    (PLAN, "profile=none", ["profile is 'none'", "maniskill_openvla", "path to a .json file"]),
    (PLAN, "profile={no_yaml}", ["no_yaml.yaml'", "path to a .json file"]),
    (PLAN, "profile={deep}", ["deep.json is no valid JSON", "measure it again"]),
    (PLAN, "profile={huge}", ["items_per_device is [1", "finite", "measure it again"]),
    (PLAN, "cluster=h100x7", ["cluster is 'h100x7'", "h100x8", "path to a .yaml file"]),
    (PLAN, "cluster={half_a_node}", ["num_nodes is 0.5 in", "half_a_node.yaml", "Integer"]),
    (PLAN, "cluster={described}", ["emulated is given in", "described.yaml, but no schema has it", "remove the key"]),
    (PLAN, "cluster={no_yaml}", ["no valid YAML", "correct the file"]),
    (PLAN, "model=none", ["model is 'none'", "openvla_7b", "path to a .json file"]),
    (PLAN, "model=openvla_7b memory.num_devices=[0]", ["memory.num_devices is [0]", "use [1,2,4,8]"]),
    (EMULATE, "plan=none", ["plan is 'none'", "path to a .yaml file"]),
]
FOLDERS: list[tuple[str, str, list[str]]] = [
    # checkpoints
    (VLA, "resume=/nowhere", ["/nowhere does not exist", "checkpoints/latest"]),
    (VLA, "resume={run}", ["has the format 'of no checkpoint'", "give a folder such as"]),
    (VLA, "resume={damaged}/checkpoints/step_000002", ["the checksum of model.safetensors differs", "use step_000001"]),
    (
        VLA,
        "resume={leaves}/checkpoints/step_000002",
        ["'../../../etc/passwd', which leads out of the checkpoint", "use step_000001"],
    ),
    (
        VLA,
        "resume={linked}/checkpoints/step_000002",
        ["model.safetensors is a link that leads elsewhere", "use step_000001"],
    ),
    (VLA, "run.dir={run} run.seed=9", ["run.seed is 9 here and 3 there", "another run.dir"]),
    (VLA, "run.dir={run} env.obs_size=32", ["env.obs_size is 32 here and 16 there", "another run.dir"]),
    (VLA, "run.dir={ruined}", ["step_000002 is incomplete (manifest.json", "use another run.dir"]),
    (VLA, "warm_start.checkpoint={run}/checkpoints/latest env.obs_size=32", ["obs_size is 16 there and 32 here"]),
    # evaluation
    (EVALUATE, "", ["a checkpoint folder is needed", "policy=expert"]),
    (EVALUATE, "checkpoint=/nowhere", ["checkpoint is '/nowhere'", "there is no", "checkpoints/latest"]),
    (EVALUATE, "checkpoint={run}", ["there is no", "checkpoints/latest"]),
    (EVALUATE, "checkpoint={run}/checkpoints/latest env.obs_size=32", ["obs_size is 16 there and 32 here"]),
    (EVALUATE, "checkpoint={run}/checkpoints/latest eval.num_episodes=0", ["eval.num_episodes is 0", "use 200"]),
    (EVALUATE, "policy=exprt", ["policy is 'exprt'", "checkpoint, expert, random, remote or sb3"]),
    (EVALUATE, "policy=random env=point_reach eval.num_envs=0", ["eval.num_envs is 0", "at least 1"]),
]


def _plan(**devices: object) -> str:
    return json.dumps({"name": "mine", "variants": looped(**devices)})


FILES = {
    "unknown_stage.json": _plan(env="all", policy="all", actor="all", judge="all"),
    "beyond.json": _plan(env="0:7", policy="all", actor="all"),
    "endless.json": _plan(env="0:1e999999999", policy="all", actor="all"),
    "no_yaml.yaml": "a: [",
    "no_profile.json": "{}",
    "deep.json": "[" * 100_000,
    "huge.json": json.dumps(
        {"format": "rlinf-profile/2", "stages": {"a": {"s_per_call": 1, "items_per_device": [10**400]}}}
    ),
    "described.yaml": "{name: x, emulated: true, nodes: []}",
    "half_a_node.yaml": "nodes: [{kind: x, num_nodes: 0.5, devices_per_node: 1, memory_bytes: 1, cores_per_node: 1}]",
}


def _leaves(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../../etc/passwd"] = {"bytes": 1, "sha256": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest))


def _linked(path: Path) -> None:
    shutil.copy(path / "model.safetensors", path.parents[2] / "model.safetensors")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(path.parents[2] / "model.safetensors")


def _ruined(path: Path) -> None:
    for folder in path.parent.glob("step_*"):
        (folder / "manifest.json").unlink()


HARM = {
    "damaged": lambda path: (path / "model.safetensors").write_bytes(b"damage"),
    "leaves": _leaves,
    "linked": _linked,
    "ruined": _ruined,
}


@pytest.fixture(scope="module")
def places(tmp_path_factory) -> dict[str, str]:
    """Returns folders and files by name: a finished run, harmed copies of it, wrong files, a place for a new run."""
    root = tmp_path_factory.mktemp("places")
    train(tiny(f"run.dir={root / 'run'}", "run.num_iterations=2", "checkpoint.every=1"))
    for name, harm in HARM.items():
        shutil.copytree(root / "run", root / name, symlinks=True)
        harm(root / name / "checkpoints/step_000002")
    for name, text in FILES.items():
        (root / name).write_text(text)
    return {path.stem: str(path) for path in root.iterdir()} | {"new": str(root / "new")}


@pytest.fixture
def answered_soon(nothing_starts) -> Iterator[None]:
    """Fails if the message takes longer than its imports."""
    start = time.process_time()
    yield
    assert time.process_time() - start < PATIENCE_S


def words_of(command: str, words: str, places: dict[str, str]) -> list[str]:
    """Returns the words of a command, small where nothing else is said, with its places."""
    given = [word.format(**places) for word in words.split()]
    if command == VLA:
        return tiny_overrides(f"run.dir={places['new']}", *given)
    return [f"run.dir={places['new']}", *given]


@pytest.mark.usefixtures("answered_soon")
@pytest.mark.parametrize(
    ("command", "words", "parts"), [*WORDS, *FOLDERS], ids=lambda part: part if isinstance(part, str) else ""
)
def test_bad_input(places, monkeypatch, capsys, command: str, words: str, parts: list[str]) -> None:
    code, _, err = call(monkeypatch, capsys, command, *words_of(command, words, places))
    assert code == 2, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert [part for part in parts if part not in err] == [], err
    assert not Path(places["new"]).exists()
    for step in (1, 2):
        checkpoint.verify(Path(places["run"], f"checkpoints/step_00000{step}"))
