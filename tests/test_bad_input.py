"""What is wrong with a command is said in one line, with what to do, before a worker starts or a file is harmed.

One row per wrong input: the command, its words, and parts that the message must have (the config path with its value or
the file, the rule, the next action).  {name} in a word is one of the places of `places`.
"""

from __future__ import annotations

import hashlib
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

VLA, MATH, SFT, EXPORT = "train_vla", "train_llm_math", "train_sft", "export_dataset"
SAC = "train_vla algorithm=sac"  # with other sections than VLA
EVALUATE, PLAN, EMULATE = "evaluate", "plan", "emulate"
PATIENCE_S = 20.0  # of processor time: what is imported for a message, whatever else the machine does

# (command, words, parts of the message)
CONFIG: list[tuple[str, str, list[str]]] = [
    # env
    (VLA, "env=manskill_pick", ["env is 'manskill_pick'", "did you mean env=maniskill_pick?"]),
    (VLA, "env=/nowhere/env.yaml", ["/nowhere/env.yaml cannot be read", "existing YAML file"]),
    (VLA, "env.num_env=8", ["env.num_env is unknown", "did you mean env.num_envs?"]),
    (VLA, "env.num_envs=abc", ["env.num_envs is 'abc'", "use a whole number"]),
    (VLA, "env.num_envs=70", ["env.num_envs is 70", "multiple of env.block_size", "use "]),
    (VLA, "env.horizon=0", ["env.horizon is 0", "at least 1"]),
    (VLA, "env.execute_steps=6", ["env.execute_steps is 6", "predicts env.chunk=4", "use at most"]),
    (VLA, "env.hold_steps=99", ["env.hold_steps is 99", "lies in [0, env.horizon", "use "]),
    (VLA, "env.camera_eye=[0,0,1]", ["env.camera_eye is [0.0, 0.0, 1.0]", "needs both or neither", "give both"]),
    (VLA, "env.backend=gpuu", ["env.backend is 'gpuu'", "auto, batched, cpu, stock, gpu"]),
    (VLA, "env._target_=nowhere.make_env", ["env._target_ is 'nowhere.make_env'", "nowhere"]),
    # policy
    (VLA, "policy=tinyvla", ["policy is 'tinyvla'", "did you mean policy=tiny_vla?"]),
    (VLA, "policy.options.num_heads=0", ["policy.options.num_heads is 0", "at least 1"]),
    (VLA, "policy.options.num_layers=-1", ["policy.options.num_layers is -1", "at least 1"]),
    (VLA, "policy.options.stem_width=0", ["policy.options.stem_width is 0", "at least 1"]),
    (
        VLA,
        "policy.options.hidden_size=31",
        ["hidden_size is 31", "multiple of policy.options.num_heads", "change one"],
    ),
    (VLA, "policy.options.num_bins=1", ["policy.options.num_bins is 1", "at least two values", "use 33"]),
    (VLA, "policy.temperature=0", ["policy.temperature is 0.0", "positive", "use "]),
    (VLA, "policy._target_=policies.none.Policy", ["policy._target_ is 'policies.none.Policy'", "policies.none"]),
    # hierarchy
    (VLA, "hierarchy.every=-1", ["hierarchy.every is -1", "number of chunk-steps", "use 5, or 0"]),
    (
        VLA,
        "hierarchy.every=5",
        ["hierarchy is 'with none of them'", "chooses from one of", "hierarchy.goal_low=[-1,-1]"],
    ),
    (VLA, "hierarchy.every=5 hierarchy.instructions=[go]", ["hierarchy.instructions is ['go']", "one is no choice"]),
    (
        *(VLA, "hierarchy.every=5 hierarchy.goal_low=[0] hierarchy.goal_high=[1]"),
        ["hierarchy.columns is []", "where the low-level policy sees its goal", "name the columns"],
    ),
    (
        *(VLA, "hierarchy.every=5 hierarchy.goals=[[1],[x]] hierarchy.columns=[2]"),
        ["hierarchy.goals is ['x']", "1 finite numbers", "give 1 numbers"],
    ),
    (
        *(VLA, "hierarchy.every=5 hierarchy.goal_low=[1] hierarchy.goal_high=[0] hierarchy.columns=[2]"),
        ["hierarchy.goal_low is [1.0]", "below that of hierarchy.goal_high=[0.0]", "exchange the two"],
    ),
    (
        *(VLA, "hierarchy.every=99 hierarchy.goal_low=[0] hierarchy.goal_high=[1] hierarchy.columns=[2]"),
        ["hierarchy.every is 99", "no second decision", "use "],
    ),
    (
        *(VLA, "hierarchy.every=2 hierarchy.instructions=[a,b] warm_start.from_nothing=true"),
        ["hierarchy.frozen is True", "never does what it is told", "warm_start.checkpoint=<dir>"],
    ),
    # algorithm
    (VLA, "algorithm=pp0", ["algorithm is 'pp0'", "did you mean algorithm=ppo?"]),
    (VLA, "algorithm.lr=0", ["algorithm.lr is 0.0", "positive"]),
    (VLA, "algorithm.lr=nan", ["algorithm.lr is nan", "positive"]),
    (VLA, "algorithm.lr=inf", ["algorithm.lr is inf", "positive"]),
    (VLA, "algorithm.gamma=1.5", ["algorithm.gamma is 1.5", "[0, 1]", "use 0.97"]),
    (VLA, "algorithm.clip_low=-0.1", ["algorithm.clip_low is -0.1", "positive"]),
    (VLA, "algorithm.target_kl=-1", ["algorithm.target_kl is -1.0", "positive", "use null"]),
    (VLA, "algorithm.value_epochs=-1", ["algorithm.value_epochs is -1", "not be negative", "use 0"]),
    (VLA, "algorithm.lr_end_fraction=2", ["algorithm.lr_end_fraction is 2.0", "[0, 1]"]),
    (VLA, "algorithm.reduction=fast", ["algorithm.reduction is 'fast'", "fixed order", "run.exact=false"]),
    (
        VLA,
        "algorithm=grpo algorithm.group_size=3 env.auto_reset=false",
        ["env.block_size is", "group_size=3", "multiple"],
    ),
    (
        VLA,
        "algorithm=grpo algorithm.group_size=4 env.auto_reset=true",
        ["env.auto_reset is True", "set env.auto_reset=false"],
    ),
    (VLA, "env=point_reach env.options.crash_at_step=x", ["env.options.crash_at_step is 'x'", "a number is needed"]),
    (
        VLA,
        "env._target_=envs.maniskill.make_env env.task=PickCube-v1 env.options.crash=1",
        ["env.options.crash is 1", "leave it out"],
    ),
    (VLA, "algorithm.max_resamples=-1", ["algorithm.max_resamples is -1", "not be negative", "use 0"]),
    # learning from transitions
    (SAC, "algorithm=sak", ["algorithm is 'sak'", "did you mean algorithm=sac?"]),
    (SAC, "algorithm.batch_size=0", ["algorithm.batch_size is 0", "at least 1"]),
    (SAC, "algorithm.batch_size=255", ["algorithm.batch_size is 255", "2 blocks", "use 254"]),
    (SAC, "algorithm.capacity=32", ["algorithm.capacity is 32", "an iteration gathers", "64"]),
    (SAC, "algorithm=iql", ["data is None", "learns from recorded transitions", "give data="]),
    (SAC, "algorithm=bc data=x algorithm.expert_steps=9", ["expert_steps is 9", "no env step", "use 0"]),
    (SAC, "algorithm=dagger data=x algorithm.expert_steps=0", ["data is 'x'", "learns from what it gathers"]),
    (SAC, "algorithm=rlpd data=x", ["algorithm.expert_steps is 4000", "holds the demonstrations", "use 0"]),
    (SAC, "algorithm=dagger algorithm.expert_steps=0", ["expert_steps is 0", "begins with", "use 2000"]),
    (SAC, "algorithm.demonstration_share=2", ["algorithm.demonstration_share is 2.0", "share", "use 0.5"]),
    (SAC, "algorithm=iql data=x algorithm.expectile=1", ["algorithm.expectile is 1.0", "(0, 1)", "use 0.7"]),
    (SAC, "algorithm.lr=0", ["algorithm.lr is 0.0", "positive"]),
    (SAC, "algorithm.updates_per_step=-1", ["algorithm.updates_per_step is -1.0", "positive"]),
    (SAC, "algorithm.warmup_steps=-1", ["algorithm.warmup_steps is -1", "not be negative", "use 0"]),
    (SAC, "algorithm.gamma=1", ["algorithm.gamma is 1.0", "[0, 1)", "use 0.99"]),
    (SAC, "algorithm.tau=0", ["algorithm.tau is 0.0", "(0, 1]", "use 0.005"]),
    (SAC, "algorithm.target_critics=3", ["algorithm.target_critics is 3", "num_critics=2", "at most 2"]),
    (SAC, "algorithm.critic_layers=0", ["algorithm.critic_layers is 0", "at least 1"]),
    (SAC, "algorithm.entropy_coef=-1", ["algorithm.entropy_coef is -1.0", "not be negative", "use null"]),
    (SAC, "algorithm.reduction=fast", ["algorithm.reduction is 'fast'", "fixed order", "run.exact=false"]),
    (SAC, "algorithm.clip_low=1", ["algorithm.clip_low is unknown", "algorithm has _target_"]),
    (SAC, "env.chunk=5", ["env.chunk is 5", "a transition is one env step", "use env.chunk=1"]),
    (SAC, "env.cameras=[rgb_array]", ["env.cameras is ['rgb_array']", "see a state", "use env.cameras=[]"]),
    (SAC, "env.auto_reset=false env.carry_over=false", ["env.auto_reset is False", "set env.auto_reset=true"]),
    (SAC, "env.carry_over=false", ["env.chunks_per_rollout is 8", "env.carry_over=true"]),
    (SAC, "policy.temperature=0.5", ["policy.temperature is 0.5", "log-probs", "use 1.0"]),
    # warm start
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
    (VLA, "warm_start.teacher=/nowhere", ["warm_start.teacher is '/nowhere'", "give a checkpoint folder"]),
    (
        VLA,
        "warm_start.teacher=/a warm_start.checkpoint=/b",
        ["warm_start.checkpoint is '/b'", "one policy", "give one"],
    ),
    (VLA, "warm_start.num_demos=1", ["warm_start.num_demos is 1", "at least one", "use 480"]),
    (
        VLA,
        "warm_start.region=[1,0,0,1]",
        ["warm_start.region is [1.0, 0.0, 0.0, 1.0]", "rectangle", "null for the whole"],
    ),
    (VLA, "warm_start.noise=[-1]", ["warm_start.noise is [-1.0]", "none is negative", "use [0.0]"]),
    (VLA, "warm_start.lr=0", ["warm_start.lr is 0.0", "positive", "use 1e-3"]),
    # run, evaluation, logging
    (VLA, "run.seed=-1", ["run.seed is -1", "[0, 2^31)", "use 0"]),
    (VLA, "run.num_iterations=-1", ["run.num_iterations is -1", "not be negative", "use 60"]),
    (VLA, "run.until_success=2", ["run.until_success is 2.0", "share of episodes", "use 0.97"]),
    (VLA, "run.exact=maybe", ["run.exact is 'maybe'", "off, exact, portable"]),
    (VLA, "run.dir=/proc/nowhere", ["run.dir is '/proc/nowhere'", "cannot be written", "use another run.dir"]),
    (VLA, "wandb.resume=must", ["wandb.resume is 'must'", "wandb.id", "give wandb.id=<id>"]),
    (VLA, "eval.num_episodes=0", ["eval.num_episodes is 0", "at least 1", "use 200"]),
    (VLA, "eval.every=-1", ["eval.every is -1", "not be negative", "use 0"]),
    (VLA, "eval.video_size=0", ["eval.video_size is 0", "at least 1"]),
    (VLA, "eval.seed=-5", ["eval.seed is -5", "apart from training's", "use 9000"]),
    (VLA, "checkpoint.keep=0", ["checkpoint.keep is 0", "newest one is always kept", "use 1 or more"]),
    (VLA, "checkpoint.every=-1", ["checkpoint.every is -1", "not be negative", "use 0"]),
    # reasoning
    (MATH, "algorithm=ppp", ["algorithm is 'ppp'", "did you mean algorithm=ppo?"]),
    (MATH, "reward.concurrency=4", ["reward.concurrency is 4", "a function of one's own", "use 1"]),
    (MATH, "reward.waits=true", ["reward.waits is True", "without reward._target_"]),
    (MATH, "cluster.cpu_devices=2", ["cluster.cpu_devices is 2", "only training and evaluation in simulators"]),
    (MATH, "cluster.waiting_devices=-1", ["cluster.waiting_devices is -1", "not negative"]),
    (MATH, "cluster=ray cluster.waiting_devices=1", ["cluster.waiting_devices is 1", "on this machine"]),
    (MATH, "data.level=sums", ["data.level is 'sums'", "sum"]),
    (MATH, "data.files.train=x.jsonl", ["data.files is", "a file each", "add the missing one"]),
    (MATH, "data.files.all=/nowhere.jsonl policy.folder={run}", ["/nowhere.jsonl"]),
    (MATH, "policy.folder=/nowhere", ["policy.folder is '/nowhere'", "no such folder", "give one"]),
    (MATH, "policy.lora.rank=-1", ["policy.lora.rank is -1", "not be negative", "use 16"]),
    (MATH, "generation.rows_per_block=5", ["generation.rows_per_block", "5", "use "]),
    (MATH, "generation.temperature=0", ["generation.temperature is 0.0", "positive", "use 1.0"]),
    (MATH, "generation.top_p=0", ["generation.top_p is 0.0", "(0, 1]", "use 1.0"]),
    (MATH, "generation.engine=vllm", ["generation.engine is 'vllm'", "run.exact=false"]),
    (MATH, "algorithm.group_size=1", ["algorithm.group_size is 1", "at least two", "use 8"]),
    (MATH, "algorithm.lr=inf", ["algorithm.lr is inf", "positive"]),
    (
        MATH,
        "algorithm.tokens_per_microbatch=5",
        ["algorithm.tokens_per_microbatch is 5", "none is cut", "use at least"],
    ),
    (MATH, "reward._target_=nowhere.score", ["reward._target_ is 'nowhere.score'", "nowhere"]),
    (MATH, "reward.timeout_s=0", ["reward.timeout_s is 0.0", "positive", "use 2.0"]),
    (MATH, "run.until_success=0.9", ["run.until_success is 0.9", "leave it out"]),
    (MATH, "eval.num_problems=0", ["eval.num_problems is 0", "at least 1", "use 1000"]),
    (MATH, "warm_start.betas=[1]", ["warm_start.betas is [1.0]", "two numbers", "use [0.9,0.98]"]),
    # data sets
    (SFT, "", ["data is not given", "give data="]),
    (SFT, "data=/nowhere.h5", ["/nowhere.h5"]),
    (SFT, "data=x sft.schedule=cosin", ["sft.schedule is 'cosin'", "one_cycle"]),
    (EXPORT, "out={new}.h5 policy=random", ["policy is 'random'", "checkpoint or expert"]),
    (EXPORT, "out={new}.h5 checkpoint=/nowhere", ["checkpoint is '/nowhere'", "give a checkpoint folder"]),
]
MACHINE: list[tuple[str, str, list[str]]] = [
    # cluster
    (VLA, "cluster=h100", ["cluster is 'h100'", "choose from"]),
    (VLA, "cluster=emulated_h100x8", ["only described", "experiments/plan.py", "train with cluster=local"]),
    (VLA, "cluster.num_devices=0", ["cluster.num_devices is 0", "at least 1", "leave it out"]),
    (VLA, "cluster=local cluster.torch_device=tpu", ["cluster.torch_device is 'tpu'", "give cluster.num_devices"]),
    (VLA, "cluster.session=threads", ["cluster.session is 'threads'", "ray or serial"]),
    (VLA, "cluster.first_progress_s=0", ["cluster.first_progress_s is 0.0", "positive", "use 600"]),
    (VLA, "cluster.object_store_bytes=5", ["cluster.object_store_bytes is 5", "bytes or more", "leave it out"]),
    (
        VLA,
        "cluster=serial cluster.transport=object_store",
        ["cluster.transport is 'object_store'", "cluster.session=ray"],
    ),
    (MATH, "cluster.num_devices=0", ["cluster.num_devices is 0", "at least 1", "leave it out"]),
    # plans
    (VLA, "plan=colocated", ["plan is 'colocated'", "did you mean plan=collocated?"]),
    (VLA, "plan=/nowhere.yaml", ["/nowhere.yaml cannot be read", "existing YAML file"]),
    (VLA, "plan=disaggregated cluster.num_devices=1", ["needs at least 2 devices", "use plan=collocated"]),
    (VLA, "plan=collocated cluster.num_devices=64", ["devices, but there are only 4 blocks", "or fewer devices"]),
    (VLA, "plan={unknown_stage}", ["places the stages", "remove ['judge']"]),
    (VLA, "plan={beyond}", ["has the devices '0:7'", "a range like '0:1/2'", "correct the plan"]),
    (VLA, "plan={endless}", ["has the devices '0:1e999999999'", "a range like '0:1/2'", "correct the plan"]),
    (VLA, "plan={no_yaml}", ["no valid YAML", "correct the file"]),
    (VLA, "plan.profile_budget_s=0", ["plan.profile_budget_s is 0.0", "positive", "use 6"]),
    (VLA, "cluster.num_devices=2 plan.profile=/nowhere.json", ["/nowhere.json cannot be read", "path of a profile"]),
    (VLA, "cluster.num_devices=2 plan.profile={no_profile}", ["no_profile.json: format is", "measure it again"]),
    (MATH, "plan=disagregated", ["plan is 'disagregated'", "did you mean"]),
    # planner
    (PLAN, "profile=none", ["profile is 'none'", "maniskill_openvla", "path to a .json file"]),
    (PLAN, "profile={no_yaml}", ["no_yaml.yaml'", "path to a .json file"]),
    (PLAN, "profile={deep}", ["deep.json is no valid JSON", "measure it again"]),
    (PLAN, "profile={huge}", ["items_per_device is 1", "finite", "measure it again"]),
    (PLAN, "cluster=h100x7", ["cluster is 'h100x7'", "emulated_h100x8", "path to a .yaml file"]),
    (PLAN, "cluster={half_a_node}", ["half_a_node.yaml.nodes[0].num_nodes is 0.5", "whole number", "correct the file"]),
    (PLAN, "cluster={no_yaml}", ["no valid YAML", "correct the file"]),
    (PLAN, "workflow=reasoning", ["workflow=reasoning is asked for", "of embodied", "use a profile"]),
    (PLAN, "num_ranked=0", ["num_ranked is 0", "at least 1", "use 8"]),
    (PLAN, "num_items=-4", ["num_items is -4", "positive", "use 256"]),
    (PLAN, "model=none", ["model is 'none'", "openvla_7b", "path to a config.json"]),
    (PLAN, "model=openvla_7b memory.num_devices=[0]", ["memory.num_devices is [0]", "use [1,2,4,8]"]),
    (EMULATE, "plan=none", ["plan is 'none'", "path to a plan file"]),
    (EMULATE, "time_scale=0", ["time_scale is 0.0", "positive", "use 0.02"]),
]
FOLDERS: list[tuple[str, str, list[str]]] = [
    # checkpoints
    (VLA, "resume=/nowhere", ["/nowhere does not exist", "checkpoints/latest"]),
    (VLA, "resume={run}", ["is incomplete", "give a folder such as"]),
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
    (VLA, "run.dir={run} resume=never", ["holds another run and resume=never", "use another run.dir"]),
    (VLA, "run.dir={run} run.seed=9", ["run.seed is 9 here and 3 there", "another run.dir"]),
    (VLA, "run.dir={run} env.obs_size=32", ["env.obs_size is 32 here and 16 there", "another run.dir"]),
    (
        VLA,
        "run.dir={ruined}",
        ["none can be used", "step_000001 is incomplete", "step_000002 is incomplete", "to begin anew"],
    ),
    (VLA, "run.dir={elsewhere}", ["process 17 on alpha since", "its lease ends in", "use another run.dir"]),
    (VLA, "warm_start.checkpoint={run}/checkpoints/latest env.obs_size=32", ["obs_size is 16 there and 32 here"]),
    # evaluation
    (EVALUATE, "", ["a checkpoint folder is needed", "policy=expert"]),
    (EVALUATE, "checkpoint=/nowhere", ["checkpoint is '/nowhere'", "there is no", "checkpoints/latest"]),
    (EVALUATE, "checkpoint={run}", ["there is no", "checkpoints/latest"]),
    (EVALUATE, "checkpoint={run}/checkpoints/latest env.obs_size=32", ["obs_size is 16 there and 32 here"]),
    (EVALUATE, "checkpoint={run}/checkpoints/latest eval.num_episodes=0", ["eval.num_episodes is 0", "use 200"]),
    (EVALUATE, "policy=exprt", ["policy is 'exprt'", "checkpoint, expert, random or sb3"]),
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
    "half_a_node.yaml": "nodes: [{kind: x, num_nodes: 0.5, devices_per_node: 1, memory_bytes: 1, cores_per_node: 1}]",
}


def _leaves(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../../etc/passwd"] = {"bytes": 1, "sha256": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    (path / "COMPLETE").write_text(hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest())


def _linked(path: Path) -> None:
    shutil.copy(path / "model.safetensors", path.parents[2] / "model.safetensors")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").symlink_to(path.parents[2] / "model.safetensors")


def _ruined(path: Path) -> None:
    for folder in path.parent.glob("step_*"):
        (folder / "COMPLETE").unlink()


HARM = {
    "damaged": lambda path: (path / "model.safetensors").write_bytes(b"damage"),
    "leaves": _leaves,
    "linked": _linked,
    "ruined": _ruined,
    "elsewhere": lambda path: (path.parents[1] / ".lock").write_text("process 17 on alpha since 2026-01-31 12:00:00"),
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
def nothing_starts(monkeypatch) -> Iterator[None]:
    """Fails if a session is opened: with it Ray would start."""

    def refuse(config: object) -> None:
        raise AssertionError("a session was opened")

    monkeypatch.setattr("rlinf_embodied.runtime.session.make_session", refuse)
    monkeypatch.setattr("rlinf_embodied.training.trainer.make_session", refuse)
    start = time.process_time()
    yield
    assert time.process_time() - start < PATIENCE_S


def words_of(command: str, words: str, places: dict[str, str]) -> list[str]:
    """Returns the words of a command, small where nothing else is said, with its places."""
    given = [word.format(**places) for word in words.split()]
    if command == VLA:
        return tiny_overrides(f"run.dir={places['new']}", *given)
    transitions = ["env=gymnasium", "policy=soft_actor", "algorithm=sac"] if command == SAC else []
    return [f"run.dir={places['new']}", *transitions, *given]


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("command", "words", "parts"), [*CONFIG, *MACHINE, *FOLDERS], ids=lambda part: part if isinstance(part, str) else ""
)
def test_bad_input(places, monkeypatch, capsys, command: str, words: str, parts: list[str]) -> None:
    code, _, err = call(monkeypatch, capsys, command.split()[0], *words_of(command, words, places))
    assert code == 2, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert [part for part in parts if part not in err] == [], err
    assert not Path(places["new"]).exists()
    for step in (1, 2):
        checkpoint.verify(Path(places["run"], f"checkpoints/step_00000{step}"))


def test_there_are_many() -> None:
    everything = [*CONFIG, *MACHINE, *FOLDERS]
    assert len({(command, words) for command, words, _ in everything}) == len(everything) > 100
