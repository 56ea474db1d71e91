"""Every file under configs/ composes; every kind of bad input is answered with path, value, rule and next action."""

import json
from pathlib import Path

import pytest
import yaml

from rlinf_embodied.algorithms.grpo import GRPOConfig
from rlinf_embodied.algorithms.imitation import SFTConfig
from rlinf_embodied.algorithms.ppo import PPOConfig
from rlinf_embodied.compose import (
    CONFIG_DIR,
    choices,
    compose_evaluate,
    compose_export,
    compose_math,
    compose_train,
    groups,
    load,
    to_yaml,
)
from rlinf_embodied.config import EnvConfig, Exactness, MathConfig, Reward, TrainConfig
from rlinf_embodied.errors import ConfigError

ALL_CHOICES = [(group, name) for group in groups(TrainConfig) for name in choices(group, TrainConfig)]
MATH_CHOICES = [(group, name) for group in groups(MathConfig) for name in choices(group, MathConfig)]
VLA, MATH, TRANSITIONS = [], ["run.seed=0"], ["env=gymnasium", "policy=soft_actor", "algorithm=sac"]
STATE = ["policy=soft_actor", "env.cameras=[]"]  # of a policy that learns from transitions
NEEDS = {  # have no default
    "files": ["data.files.all=x.jsonl", "policy.folder=x"],
    "folder": ["policy.folder=x"],
    **{name: ["env.task=PickCube-v1"] for name in ("maniskill", "remote")},
    **{name: ["data=x", *STATE] for name in ("iql", "bc")},
    **{name: STATE for name in ("sac", "rlpd", "dagger", "hg_dagger")},  # noqa: C420
}


@pytest.mark.parametrize(("group", "name"), ALL_CHOICES, ids=lambda part: part)
def test_every_choice_composes(group, name):
    config = compose_train([f"{group}={name}", *NEEDS.get(name, [])])
    assert isinstance(config, TrainConfig)
    assert config.env.num_blocks * config.env.block_size == config.env.num_envs


def test_an_iteration_of_fine_tuning_is_an_epoch_of_the_files_given():
    config = compose_train(["algorithm=sft", "data=a b.h5,runs/it's"])
    assert config.files == ["a b.h5", "runs/it's"]
    assert isinstance(config.algorithm, SFTConfig)
    assert config.run.num_iterations == config.algorithm.num_epochs == 45


SFT = ["algorithm=sft", "data=x"]


@pytest.mark.parametrize(
    ("compose", "overrides", "says"),
    [
        (compose_train, [*SFT, "run.num_iterations=3"], "run.num_iterations is 3, .* algorithm.epochs"),
        (compose_train, [*SFT, "algorithm.held_out=1"], "algorithm.held_out is 1.0, .* lie in .0, 0.5.: use 0.1"),
        (compose_train, [*SFT, "algorithm.head_lr=0"], "algorithm.head_lr is 0.0, but it must be positive"),
        (compose_train, [*SFT, "run.until_success=0.9"], "run.until_success is 0.9, .*leave it out"),
        (compose_export, ["policy=expert"], "out is not given, but the command needs it"),
        (compose_export, ["out=x"], "checkpoint is None, but a checkpoint folder is needed"),
        (compose_export, ["out=x", "policy=random"], "policy is 'random', but it is checkpoint, expert or remote"),
        (compose_export, ["out=x", "policy=expert", "num_episodes=0"], "num_episodes is 0, but it must be at least 1"),
    ],
)
def test_bad_input_to_the_commands_of_data_sets_is_named(compose, overrides, says):
    with pytest.raises(ConfigError, match=says):
        compose(overrides)


def test_every_file_under_configs_is_a_choice_or_a_main_config():
    files = {str(path.relative_to(CONFIG_DIR)) for path in CONFIG_DIR.rglob("*") if path.is_file()}
    expected = {f"{group}/{name}.yaml" for group, name in ALL_CHOICES}
    expected |= {f"reasoning/{group}/{name}.yaml" for group, name in MATH_CHOICES if group != "cluster"}
    expected |= {"train_vla.yaml", "evaluate.yaml"}
    expected |= {"train_llm_math.yaml", "evaluate_answers.yaml", "export_dataset.yaml"}
    assert {file for file in files if not file.startswith(("profiles/", "models/", "described_clusters/"))} == expected


@pytest.mark.parametrize(("group", "name"), MATH_CHOICES, ids=lambda part: part)
def test_every_choice_of_the_reasoning_workflow_composes(group, name):
    config = compose_math([f"{group}={name}", *NEEDS.get(name, [])])
    assert isinstance(config, MathConfig)
    if name != "sft":
        assert config.num_blocks * config.rows_per_block == config.num_rows
        assert config.num_blocks % config.blocks_per_batch == 0


def test_overrides_reach_every_section_with_their_types():
    config = compose_train(
        [
            "run.dir=/tmp/some run",
            "run.seed=3",
            "run.exact=false",
            "env.options.backend=stock",
            "env.cameras=[base_camera]",
            "env.options.crash=0.5",
            "algorithm.reduction=fast",
            "algorithm.target_kl=null",
            "eval.num_episodes=10",
            "checkpoint.keep=1",
            "warm_start.checkpoint=a/b-c_1.2",
            "cluster.num_devices=2",
            "resume=runs/x/checkpoints/step_000010",
        ]
    )
    assert (config.run.dir, config.run.seed, config.run.exact) == ("/tmp/some run", 3, Exactness.off)
    assert config.env.options["backend"] == "stock"
    assert config.env.cameras == ["base_camera"]
    assert config.env.options["crash"] == 0.5
    assert isinstance(config.algorithm, PPOConfig)
    assert config.algorithm.target_kl is None
    assert config.warm_start.checkpoint == "a/b-c_1.2"
    assert config.resume == "runs/x/checkpoints/step_000010"


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ([], Exactness.portable),
        (["run.exact=portable"], Exactness.portable),
        (["run.exact=true"], Exactness.exact),
        (["run.exact=exact"], Exactness.exact),
        (["run.exact=False"], Exactness.off),
        (["run.exact=off"], Exactness.off),
    ],
)
def test_exactness_is_a_choice_that_also_takes_true_and_false(text: list[str], chosen: Exactness):
    assert compose_train(text).run.exact is chosen


def test_grpo_brings_whole_episodes_and_follows_the_horizon():
    config = compose_train(["algorithm=grpo", "env.horizon=60", "env.chunk=4"])
    assert type(config.algorithm) is GRPOConfig
    assert not config.env.auto_reset
    assert config.env.chunks_per_rollout == 15  # 60 / 4


# (base, words, what the message must hold: path, value, rule or neighbours, next action)
BAD_INPUT = [
    (VLA, "env=manskill_pick", "env is 'manskill_pick'|did you mean env=maniskill_pick?|maniskill_pick"),
    (VLA, "plan=colocated", "plan is 'colocated'|did you mean plan=collocated?|disaggregated|.yaml file"),
    (VLA, "env=maniskill", "env.task is not given|give env.task=<name>"),
    (VLA, "env.num_env=1", "env.num_env is unknown|did you mean env.num_envs?|horizon"),
    (VLA, "num_envs=1", "num_envs is unknown|did you mean env.num_envs?"),
    (VLA, "resume.x=1", "resume.x is unknown|did you mean resume?|the top level has cluster, plan"),
    (VLA, "env.num_envs", "'env.num_envs' has no value|use env.num_envs=<value>"),
    (VLA, "env.cameras=[", "env.cameras is '['|cannot be read|lists are [a,b]"),
    (VLA, "env.chunk=1,2", "env.chunk is '1,2'|must be int|give such a value"),
    (VLA, "run.dry=maybe", "run.dry is 'maybe'|must be bool"),
    (VLA, "env.cameras=3", "env.cameras is 3|list[str]"),
    (VLA, "algorithm.target_kl=x", "algorithm.target_kl is 'x'|float | None"),
    (VLA, "env.horizon=${nope}", "env.horizon|nope|must be int"),
    (VLA, "env.num_envs=70", "env.num_envs is 70|multiple of env.block_size=16|use 64"),
    (VLA, "env.chunks_per_rollout=8", "env.chunks_per_rollout is 8|may take 10 chunk-steps|env.carry_over=true"),
    (VLA, "env.chunk=51", "env.chunk is 51|env.horizon=50|use a smaller one"),
    (VLA, "algorithm.reduction=fast", "algorithm.reduction is 'fast'|run.exact=true|set run.exact=false"),
    (VLA, "eval.seed=1073741824", "eval.seed is 1073741824|2^30"),
    (VLA, "env.hold_steps=99", "env.hold_steps is 99|lies in [0, env.horizon|use "),
    (VLA, "hierarchy.every=5", "chooses either an instruction, or a goal|hierarchy.goal_low=[-1,-1]"),
    (
        *(VLA, "hierarchy.every=5 hierarchy.goal_low=[0] hierarchy.goal_high=[1]"),
        "hierarchy.columns is []|it lists the columns of the proprioception that hold the goal|name the columns",
    ),
    (
        *(VLA, "hierarchy.every=5 hierarchy.goal_low=[1] hierarchy.goal_high=[0] hierarchy.columns=[2]"),
        "hierarchy.goal_low is [1.0]|below that of hierarchy.goal_high=[0.0]|exchange the two",
    ),
    (
        *(VLA, "hierarchy.every=2 hierarchy.instructions=[a,b] warm_start.from_scratch=true"),
        "hierarchy.frozen is True|never follows its goal|warm_start.checkpoint=<dir>",
    ),
    (VLA, "algorithm=grpo algorithm.group_size=3 env.auto_reset=false", "env.block_size is|group_size=3|multiple"),
    (
        *(VLA, "algorithm=grpo algorithm.group_size=4 env.auto_reset=true"),
        "env.auto_reset is True|set env.auto_reset=false",
    ),
    (VLA, "warm_start.speeds=[0.5,0]", "warm_start.speeds is [0.5, 0.0]|above 0 and at most 1|use [1.0]"),
    (VLA, "warm_start.demonstrations=/a warm_start.checkpoint=/b", "warm_start.checkpoint is '/b'|one policy|give one"),
    (VLA, "run.exact=maybe", "run.exact is 'maybe'|off, exact, portable"),
    (TRANSITIONS, "algorithm.batch_size=255", "algorithm.batch_size is 255|2 blocks|use 254"),
    (TRANSITIONS, "algorithm.capacity=32", "algorithm.capacity is 32|an iteration gathers|64"),
    (TRANSITIONS, "algorithm=iql", "data is None|learns from recorded transitions|give data="),
    (TRANSITIONS, "algorithm=dagger data=x algorithm.expert_steps=0", "data is 'x'|learns from what it gathers"),
    (TRANSITIONS, "algorithm=rlpd data=x", "algorithm.expert_steps is 4000|holds the demonstrations|use 0"),
    (
        *(VLA, "algorithm=recap data=x"),
        "data is 'x'|RECAP learns from what it gathers|set algorithm.expert_steps|warm_start.checkpoint=<run",
    ),
    (VLA, "algorithm=recap env.cameras=[]", "env.cameras is []|a text in the prompt|use policy=tiny_vla"),
    (VLA, "algorithm=recap algorithm.capacity=2001", "algorithm.capacity is 2001|steps of all|use 2000"),
    (VLA, "algorithm=recap algorithm.warmup_steps=64", "algorithm.warmup_steps is 64|of every row has ended|use 400"),
    (TRANSITIONS, "algorithm=dagger algorithm.expert_steps=0", "expert_steps is 0|begins with|use 2000"),
    (VLA, "algorithm.dual_clip=0.5", "algorithm.dual_clip is 0.5|above 1|use 3.0"),
    (
        MATH,
        "algorithm.loss=cispo algorithm.dual_clip=3",
        "algorithm.dual_clip is 3.0|CISPO has no such bound|leave it out",
    ),
    (TRANSITIONS, "env.hold_steps=2", "env.hold_steps is 2|in no state that critics see|use 1"),
    (
        VLA,
        "algorithm.bootstrap_at_timeout=true env.bonus_at_timeout=true",
        "env.bonus_at_timeout is True|stands for it",
    ),
    (TRANSITIONS, "env.chunk=5", "env.chunk is 5|a transition is one env step|use env.chunk=1"),
    (TRANSITIONS, "env.cameras=[rgb_array]", "env.cameras is ['rgb_array']|see a state|use env.cameras=[]"),
    (TRANSITIONS, "policy.temperature=0.5", "policy.temperature is 0.5|log-probs|use 1.0"),
    (MATH, "data=files policy.folder=x", "data.files is {}|use data.files.all=<file>"),
    (
        *(MATH, "data.files.all=x.jsonl"),
        "policy.folder is None|learns to write from generated problems|give warm_start.checkpoint=<run",
    ),
    (MATH, "data.files.train=x", "data.files is {'train': 'x'}|training both|add the missing one"),
    (MATH, "policy=folder", "policy.folder is ''|reads a model from disk|policy.folder=<dir>"),
    (MATH, "policy.folder=a warm_start.checkpoint=b", "warm_start.checkpoint is 'b'|give one of the two"),
    (MATH, "policy.precision=bfloat16", "policy.precision is 'bfloat16'|policy.lora.rank=16"),
    (MATH, "data.unsolved_share=0.5", "data.unsolved_share is 0.5|are not drawn again"),
    (MATH, "algorithm=rloo algorithm.loss_level=token", "algorithm.loss_level is 'token'|per completion|use sequence"),
    (MATH, "algorithm.tis_cap=null algorithm.tis_floor=0.5", "algorithm.tis_floor is 0.5|use algorithm.tis_cap=2.0"),
    (MATH, "algorithm.tis_cap=null algorithm.tis_masks=true", "algorithm.tis_masks is True|use algorithm.tis_cap=2.0"),
    (MATH, "algorithm.tis_floor=2", "algorithm.tis_floor is 2.0|below algorithm.tis_cap=2.0|use 0"),
    (MATH, "algorithm.tis_floor=-1", "algorithm.tis_floor is -1.0|must not be negative|use 0.0"),
    (MATH, "algorithm.tis_level=word", "algorithm.tis_level is 'word'|token, sequence, geometric"),
    (MATH, "algorithm=gspo algorithm.tis_masks=true", "algorithm.tis_level is 'token'|cannot be masked|use sequence"),
    (
        *(MATH, "algorithm=ppo algorithm.loss=sequence algorithm.loss_level=sequence"),
        "algorithm.loss is 'Sequence|one per token|use algorithm.loss=clipped",
    ),
    (VLA, "algorithm.loss=dppo algorithm.compile=true", "algorithm.compile is True|DPPO|use algorithm.compile=false"),
    (MATH, "algorithm.loss=dppo algorithm.loss.threshold=0", "algorithm.loss.threshold is 0.0|positive|use 0.15"),
    (MATH, "algorithm.loss=dppo algorithm.loss.divergence=js", "algorithm.loss.divergence is 'js'|tv, kl"),
    (MATH, "algorithm.group_size=1", "algorithm.group_size is 1|grpo compares|use 8, or algorithm=ppo"),
    (MATH, "algorithm=ppo algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling is True|algorithm=dapo"),
    (MATH, "algorithm=dapo algorithm.drop_zero_variance_groups=false", "algorithm.drop_zero_variance_groups is False"),
    (MATH, "algorithm=sft run.num_iterations=3", "run.num_iterations is 3|an iteration is 50|set algorithm.steps"),
    (MATH, "algorithm=sft algorithm.batch_size=7", "algorithm.batch_size is 7|2 blocks|use an even number"),
    (MATH, "warm_start.num_examples=8", "warm_start.num_examples is 8|warm_start.batch_size=32"),
    (MATH, "reward.concurrency=4", "reward.concurrency is 4|belongs to a custom function|use 1"),
    (MATH, "reward.waits=true", "reward.waits is True|belongs to a custom function|give reward._target_"),
    (MATH, "cluster.cpu_devices=2", "cluster.cpu_devices is 2|only training and evaluation in simulators"),
    (MATH, "run.until_success=0.9", "run.until_success is 0.9|leave it out"),
    (
        *(MATH, "generation.rows_per_block=48 generation.rows_per_batch=96"),
        "generation.rows_per_block is 48|the 256 completions|use 32",
    ),
]


@pytest.mark.parametrize(
    ("base", "words", "parts"), BAD_INPUT, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bad_input_is_named_with_its_rule_and_the_next_action(base, words, parts):
    with pytest.raises(ConfigError) as caught:
        (compose_math if base is MATH else compose_train)([*base, *words.split()])
    assert [part for part in parts.split("|") if part not in str(caught.value)] == [], str(caught.value)


def test_checks_have_episodes_of_their_own_where_there_are_checks():
    seeds = ["eval.seed=999950", "eval.num_episodes=51"]
    assert compose_train(seeds).eval.seed == 999950  # no goal: nothing is checked
    with pytest.raises(ConfigError, match=r"eval.check_seed is 1000000, but checks need separate episodes"):
        compose_train([*seeds, "run.until_success=0.9"])
    assert compose_train([seeds[0], "eval.num_episodes=50", "run.until_success=0.9"]).eval.num_episodes == 50


GSM8K = ["data=files", "data.files.all=gsm8k.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "tokens", "lr", "value_lr"),
    [
        ([], 52, 1e-4, None),
        (["algorithm=ppo", "data=chains"], 52, 1e-4, 3e-4),
        (["algorithm=sft"], 52, 3e-3, None),
        (["policy.folder=x", *GSM8K], 512, 1e-6, None),
        (["policy=folder", "policy.folder=x", *GSM8K, "algorithm=dr_grpo"], 512, 1e-6, None),
        (["policy.folder=x", *GSM8K, "policy.lora.rank=16", "algorithm=ppo"], 512, 1e-5, 1e-5),
        (["policy.folder=x"], 52, 1e-6, None),
        (["policy.folder=x", "data.prompt_template=natural"], 512, 1e-6, None),
        (["policy.folder=x", *GSM8K, "generation.max_new_tokens=300", "algorithm.lr=3e-6"], 300, 3e-6, None),
    ],
)
def test_defaults_follow_the_problems_and_the_model(overrides, tokens, lr, value_lr):
    config = compose_math(overrides)
    assert config.generation.max_new_tokens == tokens
    assert config.algorithm.lr == lr
    assert value_lr is None or config.rl.value_lr == value_lr


@pytest.mark.parametrize(
    ("prompts", "rows_per_block", "rows_per_batch", "blocks"),
    [(32, 64, 128, (4, 8, 2)), (32, 32, 96, (8, 4, 2)), (8, 64, 128, (1, 8, 1)), (2, 64, 128, (1, 2, 1))],
)
def test_a_smaller_run_has_smaller_batches(prompts, rows_per_block, rows_per_batch, blocks):
    sizes = [f"generation.rows_per_block={rows_per_block}", f"generation.rows_per_batch={rows_per_batch}"]
    config = compose_math([f"algorithm.prompts_per_iteration={prompts}", "algorithm.group_size=8", *sizes])
    assert (config.num_blocks, config.prompts_per_block, config.blocks_per_batch) == blocks


def test_an_env_file_is_an_override(tmp_path: Path):
    path = tmp_path / "my robot.yaml"
    path.write_text("_target_: my_robot.make_env\ntask: Reach\ncameras: []\nhorizon: 60\n")
    env = compose_train([f"env={path}", "env.horizon=80"]).env
    assert (env._target_, env.cameras, env.horizon, env.num_envs) == ("my_robot.make_env", [], 80, 64)
    assert compose_evaluate([f"env={path}", "policy=random"]).env.horizon == 60
    path.write_text("_target_: my_robot.make_env\nhorizn: 60\n")
    with pytest.raises(ConfigError, match=r"horizn is .* in .*my robot.yaml.* did you mean env.horizon\?"):
        compose_train([f"env={path}"])


def test_the_reward_follows_the_simulator():
    assert EnvConfig().reward is Reward.dense_delta
    assert EnvConfig(_target_="my_robot.make_env").reward is Reward.dense
    assert EnvConfig(_target_="my_robot.make_env", reward=Reward.sparse).reward is Reward.sparse
    assert compose_train(["env=point_reach"]).env.reward is Reward.dense_delta
    assert compose_train(["env=maniskill_push"]).env.reward is Reward.dense_delta


def test_a_plan_file_is_an_override(tmp_path: Path):
    path = tmp_path / "my plan.yaml"
    variants = [{"min_devices": 2, "items": ["actor on all"]}]
    path.write_text(yaml.safe_dump({"variants": variants}))
    config = compose_train([f"plan={path}"])
    assert (config.plan.name, config.plan.file, config.plan.variants) == ("my plan", str(path), variants)
    assert compose_train(["plan=collocated"]).plan.file is None


@pytest.mark.parametrize("name", ["größe 日本, a=b (1) [x] {y} a#b&c", 'it\'s \\ "x"', "x'", "true"])
def test_a_path_may_hold_any_character(tmp_path: Path, name: str):
    folder = tmp_path / name
    folder.mkdir()
    variants = [{"min_devices": 2, "items": ["actor on all"]}]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump({"variants": variants}))
    paths = {"run.dir": folder, "resume": folder / "x", "warm_start.checkpoint": folder, "plan.profile": folder}
    config = compose_train([*(f"{key}={path}" for key, path in paths.items()), f"plan={folder / name}.yaml"])
    assert (config.run.dir, config.warm_start.checkpoint, config.plan.profile) == (str(folder),) * 3
    assert (config.resume, config.plan.file) == (str(folder / "x"), str(folder / f"{name}.yaml"))
    assert compose_evaluate([f"checkpoint={folder}", "env=point_reach"]).checkpoint == str(folder)
    files = compose_math([f"data.files.all={folder}", f"policy.folder={folder}"]).data.files
    assert dict(files) == {"all": str(folder)}
    assert compose_train([f"warm_start.checkpoint={name}"]).warm_start.checkpoint == name


def test_a_file_may_stand_where_a_language_preset_could(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("variants: [{min_devices: 1, items: [prompts+generation+reward+actor on all]}]")
    assert compose_math([f"plan={tmp_path / 'mine.yaml'}"]).plan.name == "mine"


def test_a_path_may_be_quoted(tmp_path: Path):
    quote = "'"
    (tmp_path / "my plan.yaml").write_text("variants: [{min_devices: 1, items: [actor on all]}]")
    given = {"run.dir": tmp_path / "größe (1)", "plan": tmp_path / "my plan.yaml"}
    config = compose_train([f"{key}={quote}{path}{quote}" for key, path in given.items()])
    assert (config.run.dir, config.plan.file) == (str(given["run.dir"]), str(given["plan"]))
    assert compose_train(["run.dir=null"]).run.dir is None
    assert compose_train(["run.dir=runs/${env.task}"]).run.dir == "runs/PickCube-v1"
    with pytest.raises(ConfigError, match=r"run.dir is .*Interpolation key 'a' not found"):
        compose_train(["run.dir=/x/${a}"])


def test_the_plan_json_of_a_run_is_a_plan_file(tmp_path: Path):
    path = tmp_path / "plan.json"
    items = ["actor on 0-1"]
    path.write_text(json.dumps({"name": "collocated", "num_devices": 2, "items": items}))
    plan = compose_train([f"plan={path}"]).plan
    assert (plan.name, plan.variants) == ("collocated", [{"min_devices": 2, "max_devices": 2, "items": items}])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("nmae: x\nvariants: [{min_devices: 1}]", ["nmae", "did you mean plan.name?", "plan.yaml"]),
        ("name: x", ["neither `items` nor `variants`"]),
        ("- a\n- b", ["holds a list"]),
        ("a: [", ["no valid YAML"]),
        ("variants: 3", ["variants is 3", "plan.yaml"]),
    ],
)
def test_a_bad_plan_file_is_refused(tmp_path: Path, text, parts):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        compose_train([f"plan={path}"])
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize("overrides", [[], ["algorithm=grpo", "plan=disaggregated", "cluster=serial", "run.seed=5"]])
def test_a_config_survives_its_yaml(tmp_path: Path, overrides):
    config = compose_train(overrides)
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load(path, TrainConfig) == config


def test_a_saved_config_with_a_foreign_key_names_file_and_key(tmp_path: Path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(compose_train([])).replace("num_envs: 64", "num_env: 64", 1))
    with pytest.raises(ConfigError, match=r"env\.num_env is .*config\.yaml.* did you mean env\.num_envs\?"):
        load(path, TrainConfig)


def test_evaluation_takes_the_env_of_the_checkpoint_below_its_own_overrides(tmp_path: Path):
    env = {"task": "PushCube-v1", "obs_size": 48, "options": {"robot": "panda_wristcam"}}
    (tmp_path / "evaluation.json").write_text(json.dumps({"env": env}))
    mine = [f"checkpoint={tmp_path}", "env.num_envs=16"]
    env = compose_evaluate(mine).env
    assert (env.task, env.obs_size, env.num_envs, env.options["robot"]) == ("PushCube-v1", 48, 16, "panda_wristcam")
    assert compose_evaluate([*mine, "env=maniskill_pick"]).env.task == "PickCube-v1"
