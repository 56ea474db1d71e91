"""Every file under configs/ composes; every kind of bad input is answered with path, value, rule and next action."""

import json
from pathlib import Path

import pytest
import yaml

from rlinf_embodied.compose import (
    CONFIG_DIR,
    choices,
    compose_evaluate,
    compose_export,
    compose_math,
    compose_sft,
    compose_train,
    groups,
    load,
    to_yaml,
)
from rlinf_embodied.config import (
    Backend,
    EnvConfig,
    EvaluateConfig,
    Exactness,
    GRPOConfig,
    ImitationConfig,
    MathConfig,
    PPOConfig,
    Reward,
    TrainConfig,
)
from rlinf_embodied.errors import ConfigError

ALL_CHOICES = [(group, name) for group in groups(TrainConfig) for name in choices(group)]
MATH_CHOICES = [(group, name) for group in groups(MathConfig) for name in choices(group, MathConfig)]
STATE = ["policy=soft_actor", "env.cameras=[]"]  # of a policy that learns from transitions
NEEDS = {  # have no default
    "jsonl": ["data.files.all=x.jsonl", "policy.folder=x"],
    "folder": ["policy.folder=x"],
    "maniskill": ["env.task=PickCube-v1"],
    **{name: ["data=x", *STATE] for name in ("iql", "bc")},
    **{name: STATE for name in ("sac", "rlpd", "dagger")},  # noqa: C420
}


@pytest.mark.parametrize(("group", "name"), ALL_CHOICES, ids=lambda part: part)
def test_every_choice_composes(group, name):
    config = compose_train([f"{group}={name}", *NEEDS.get(name, [])])
    assert isinstance(config, TrainConfig)
    assert config.env.num_blocks * config.env.block_size == config.env.num_envs


@pytest.mark.parametrize(("group", "name"), [(g, n) for g in groups(ImitationConfig) for n in choices(g)])
def test_every_choice_composes_for_fine_tuning(group, name):
    config = compose_sft([f"{group}={name}", "data=x.h5", *NEEDS.get(name, [])])
    assert config.run.num_iterations == config.sft.num_epochs


def test_files_are_joined_by_commas():
    assert compose_sft(["data=a b.h5,runs/it's"]).files == ["a b.h5", "runs/it's"]


@pytest.mark.parametrize(
    ("compose", "overrides", "says"),
    [
        (compose_sft, [], "data is not given, but the command needs it: give data=<file>.h5"),
        (compose_sft, ["data=x", "run.num_iterations=3"], "run.num_iterations is 3, .* sft.epochs"),
        (compose_sft, ["data=x", "sft.held_out=1"], r"sft.held_out is 1.0, but it is a share .*use 0.1"),
        (compose_sft, ["data=x", "sft.lr=0"], "sft.lr is 0.0, but it must be positive"),
        (compose_sft, ["data=x", "sft.schedule=cosin"], "sft.schedule is 'cosin', but it must be one of one_cycle"),
        (compose_sft, ["data=x", "run.until_success=0.9"], "run.until_success is 0.9, .*leave it out"),
        (compose_export, ["policy=expert"], "out is not given, but the command needs it"),
        (compose_export, ["out=x"], "checkpoint is None, but a checkpoint folder is needed"),
        (compose_export, ["out=x", "policy=random"], "policy is 'random', but it is checkpoint or expert"),
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
    expected |= {"train_llm_math.yaml", "evaluate_answers.yaml", "train_sft.yaml", "export_dataset.yaml"}
    assert {file for file in files if not file.startswith(("profiles/", "models/"))} == expected


@pytest.mark.parametrize(("group", "name"), MATH_CHOICES, ids=lambda part: part)
def test_every_choice_of_the_reasoning_workflow_composes(group, name):
    config = compose_math([f"{group}={name}", *NEEDS.get(name, [])])
    assert isinstance(config, MathConfig)
    assert config.num_blocks * config.rows_per_block == config.num_rows
    assert config.num_blocks % config.blocks_per_batch == 0


@pytest.mark.parametrize("group", groups(EvaluateConfig))
def test_evaluation_takes_the_choices_of_its_groups(group):
    for name in choices(group):
        assert isinstance(compose_evaluate(["policy=expert", f"{group}={name}", *NEEDS.get(name, [])]), EvaluateConfig)


def test_the_default_is_the_demo():
    config = compose_train([])
    assert (config.env.task, config.policy.name) == ("PickCube-v1", "tiny_vla")
    assert (type(config.algorithm), config.plan.name, config.cluster.session) == (PPOConfig, "auto", "ray")
    assert len(config.env.cameras) == 2


def test_overrides_reach_every_section_with_their_types():
    config = compose_train(
        [
            "run.dir=/tmp/some run",
            "run.seed=3",
            "run.exact=false",
            "env.backend=stock",
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
    assert config.env.backend is Backend.stock
    assert config.env.cameras == ["base_camera"]
    assert config.env.options == {"crash": 0.5}
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


def test_a_file_from_before_there_was_a_choice_of_exactness_is_read(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(compose_train([])).replace("exact: portable", "exact: true"))
    assert load(path, TrainConfig).run.exact is Exactness.exact


def test_grpo_brings_whole_episodes_and_follows_the_horizon():
    config = compose_train(["algorithm=grpo", "env.horizon=60", "env.chunk=4"])
    assert type(config.algorithm) is GRPOConfig
    assert not config.env.auto_reset
    assert config.env.chunks_per_rollout == 15  # 60 / 4


# override -> what the message must hold: path, value, rule or neighbours, next action
BAD_INPUT = [
    ("env=manskill_pick", ["env is 'manskill_pick'", "did you mean env=maniskill_pick?", "maniskill_pick"]),
    ("plan=colocated", ["plan is 'colocated'", "did you mean plan=collocated?", "disaggregated", ".yaml file"]),
    ("algorithm=pp0", ["algorithm is 'pp0'", "did you mean algorithm=ppo?", "grpo"]),
    ("env=3", ["env is '3'", "choose from"]),
    ("env=none.yaml", ["none.yaml cannot be read", "existing YAML file"]),
    ("env=maniskill", ["env.task is not given", "give env.task=<name>", "PickCube-v1, PushCube-v1"]),
    ("env.num_env=1", ["env.num_env is unknown", "did you mean env.num_envs?", "horizon"]),
    ("num_envs=1", ["num_envs is unknown", "did you mean env.num_envs?"]),
    ("+env.num_env=1", ["env.num_env is unknown"]),
    ("resume.x=1", ["resume.x is unknown", "did you mean resume?", "the top level has env, policy"]),
    ("hydra.run.dir=x", ["hydra.run.dir is unknown"]),
    ("env.num_envs", ["'env.num_envs' has no value", "use env.num_envs=<value>"]),
    ("env.cameras=[", ["env.cameras is '['", "cannot be read", "lists are [a,b]"]),
    ("env.chunk=1,2", ["env.chunk is '1,2'", "int", "use a whole number"]),
    ("env.num_envs=abc", ["env.num_envs is 'abc'", "int", "use a whole number"]),
    ("env.num_envs=1.5", ["env.num_envs is 1.5", "int", "use a whole number"]),
    ("env.num_envs=null", ["env.num_envs is None", "not Optional"]),
    ("run.dry=maybe", ["run.dry is 'maybe'", "bool", "true or false"]),
    ("env.cameras=3", ["env.cameras is 3", "list[str]", "[a,b]"]),
    ("env.backend=gpuu", ["env.backend is 'gpuu'", "auto, batched, cpu, stock, gpu"]),
    ("algorithm.target_kl=x", ["algorithm.target_kl is 'x'", "float | None", "a number or null"]),
    ("env.horizon=${nope}", ["env.horizon", "nope", "use a whole number"]),
    ("env.num_envs=70", ["env.num_envs is 70", "multiple of env.block_size=16", "use 64"]),
    ("env.chunks_per_rollout=8", ["env.chunks_per_rollout is 8", "may take 10 chunk-steps", "env.carry_over=true"]),
    ("env.chunk=51", ["env.chunk is 51", "env.horizon=50", "smaller env.chunk"]),
    ("env.execute_steps=-1", ["env.execute_steps is -1", "env.chunk=5", "at most that many"]),
    ("algorithm.gamma=1.5", ["algorithm.gamma is 1.5", "[0, 1]"]),
    ("algorithm.reduction=fast", ["algorithm.reduction is 'fast'", "run.exact=true", "set run.exact=false"]),
    ("algorithm.dual_clip=1", ["algorithm.dual_clip is 1.0", "1 + algorithm.clip_high=0.2", "use 3.0, or null"]),
    ("algorithm.max_log_ratio=0", ["algorithm.max_log_ratio is 0.0", "use 20.0"]),
    ("algorithm.tis_cap=0", ["algorithm.tis_cap is 0.0", "positive", "null"]),
    ("algorithm.precision=bf16", ["algorithm.precision is 'bf16'", "float32, bfloat16"]),
    ("eval.seed=1073741824", ["eval.seed is 1073741824", "2^30"]),
    ("cluster.session=threads", ["cluster.session is 'threads'", "ray or serial"]),
    ("cluster.object_store_bytes=1000", ["cluster.object_store_bytes is 1000", "78643200 bytes or more"]),
    ("checkpoint.keep=0", ["checkpoint.keep is 0", "use 1 or more"]),
    ("plan=/nowhere/plan.yaml", ["/nowhere/plan.yaml cannot be read", "existing YAML file"]),
]


@pytest.mark.parametrize(("override", "parts"), BAD_INPUT, ids=[override for override, _ in BAD_INPUT])
def test_bad_input_is_named_with_its_rule_and_the_next_action(override, parts):
    with pytest.raises(ConfigError) as caught:
        compose_train([override])
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_checks_have_episodes_of_their_own_where_there_are_checks():
    seeds = ["eval.seed=999950", "eval.num_episodes=51"]
    assert compose_train(seeds).eval.seed == 999950  # no goal: nothing is checked
    with pytest.raises(ConfigError, match=r"eval.check_seed is 1000000, but checks have episodes of their own"):
        compose_train([*seeds, "run.until_success=0.9"])
    assert compose_train([seeds[0], "eval.num_episodes=50", "run.until_success=0.9"]).eval.num_episodes == 50


# the same for the reasoning workflow
GSM8K = ["data=jsonl", "data.files.all=gsm8k.jsonl"]
BAD_MATH_INPUT = [
    (["data=sum"], ["data is 'sum'", "did you mean data=sums?", "choose from chains, countdown, jsonl, linear, sums"]),
    (
        ["algorithm=drgrpo"],
        [
            *("algorithm is 'drgrpo'", "did you mean algorithm=dr_grpo?"),
            "dapo, dr_grpo, grpo, grpo_annealed, grpo_token, ppo, rloo",
        ],
    ),
    (["policy=tinylm"], ["policy is 'tinylm'", "did you mean policy=tiny_lm?"]),
    (["plan=pipeline"], ["plan is 'pipeline'", "did you mean plan=pipelined?", ".yaml file"]),
    (["env=maniskill_pick"], ["env is unknown", "the top level has data, policy"]),
    (["data.levl=x"], ["data.levl is unknown", "did you mean data.level?"]),
    (["algorithm.groupsize=3"], ["algorithm.groupsize is unknown", "did you mean algorithm.group_size?"]),
    (["algorithm.loss_level=tokens"], ["algorithm.loss_level is 'tokens'", "token, sequence, constant, sum"]),
    (["generation.engine=vlm"], ["generation.engine is 'vlm'", "transformers, vllm"]),
    (["data=jsonl", "policy.folder=x"], ["data.files is {}", "use data.files.all=<file>"]),
    (
        ["data.files.all=x.jsonl"],
        ["policy.folder is None", "learns to write from generated problems", "give warm_start.checkpoint=<run"],
    ),
    (["data.files.train=x"], ["data.files is {'train': 'x'}", "a file each", "add the missing one"]),
    (["data.files.tran=x"], ["data.files is {'tran': 'x'}", "train, validation, test, all"]),
    (["policy=folder"], ["policy.folder is ''", "reads a model from disk", "policy.folder=<dir>"]),
    (["policy.folder=a", "warm_start.checkpoint=b"], ["warm_start.checkpoint is 'b'", "give one of the two"]),
    (["policy.precision=bfloat16"], ["policy.precision is 'bfloat16'", "policy.lora.rank=16"]),
    (["policy.num_heads=5"], ["policy.hidden_size is 96", "policy.num_heads=5"]),
    (["algorithm.group_size=1"], ["algorithm.group_size is 1", "grpo compares", "use 8, or algorithm=ppo"]),
    (["algorithm=ppo", "algorithm.dynamic_sampling=true"], ["algorithm.dynamic_sampling is True", "algorithm=dapo"]),
    (["algorithm=dapo", "algorithm.drop_zero_variance_groups=false"], ["algorithm.drop_zero_variance_groups is False"]),
    (["algorithm.tis_cap=0"], ["algorithm.tis_cap is 0.0", "positive", "null"]),
    (["algorithm.gamma=2"], ["algorithm.gamma is 2.0", "[0, 1]"]),
    (["generation.temperature=0"], ["generation.temperature is 0.0", "use 1.0"]),
    (["generation.top_p=0"], ["generation.top_p is 0.0", "(0, 1]"]),
    (["generation.max_new_tokens=1"], ["generation.max_new_tokens is 1", "at least 2, or eval.forced_prefix=false"]),
    (["algorithm.beta2=1"], ["algorithm.beta2 is 1.0", "[0, 1)"]),
    (["warm_start.betas=[0.9]"], ["warm_start.betas is [0.9]", "two numbers", "use [0.9,0.98]"]),
    (["warm_start.lr=0"], ["warm_start.lr is 0.0", "positive"]),
    (["warm_start.num_examples=8"], ["warm_start.num_examples is 8", "warm_start.batch_size=32"]),
    (["algorithm.reduction=fast"], ["algorithm.reduction is 'fast'", "set run.exact=false"]),
    (["algorithm.dual_clip=1.2"], ["algorithm.dual_clip is 1.2", "1 + algorithm.clip_high=0.28", "use 3.0, or null"]),
    (["algorithm.max_log_ratio=100"], ["algorithm.max_log_ratio is 100.0", "overflows", "use 20.0"]),
    (
        ["generation.rows_per_block=48", "generation.rows_per_batch=96"],
        ["generation.rows_per_block is 48", "= 256 completions", "use 32"],
    ),
]


@pytest.mark.parametrize(("overrides", "parts"), BAD_MATH_INPUT, ids=lambda value: value[0])
def test_bad_input_to_the_reasoning_workflow_is_named_with_its_rule_and_the_next_action(overrides, parts):
    with pytest.raises(ConfigError) as caught:
        compose_math(overrides)
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "tokens", "lr", "value_lr"),
    [
        ([], 52, 1e-4, 3e-4),
        (["algorithm=dr_grpo", "data=linear"], 52, 1e-4, 3e-4),
        (["policy.folder=x", *GSM8K], 512, 1e-6, 1e-5),
        (["policy=folder", "policy.folder=x", *GSM8K, "algorithm=dr_grpo"], 512, 1e-6, 1e-5),
        (["policy.folder=x", *GSM8K, "policy.lora.rank=16", "algorithm=ppo"], 512, 1e-5, 1e-5),
        (["policy.folder=x"], 52, 1e-6, 1e-5),
        (["policy.folder=x", "data.prompt_template=natural"], 512, 1e-6, 1e-5),
        (["policy.folder=x", *GSM8K, "generation.max_new_tokens=300", "algorithm.lr=3e-6"], 300, 3e-6, 1e-5),
    ],
)
def test_defaults_follow_the_problems_and_the_model(overrides, tokens, lr, value_lr):
    config = compose_math(overrides)
    assert config.generation.max_new_tokens == tokens
    assert (config.algorithm.lr, config.algorithm.value_lr) == (lr, value_lr)


@pytest.mark.parametrize(
    ("prompts", "rows_per_block", "rows_per_batch", "blocks"),
    [(32, 64, 128, (4, 8, 2)), (32, 32, 96, (8, 4, 2)), (8, 64, 128, (1, 8, 1)), (2, 64, 128, (1, 2, 1))],
)
def test_a_smaller_run_has_smaller_batches(prompts, rows_per_block, rows_per_batch, blocks):
    sizes = [f"generation.rows_per_block={rows_per_block}", f"generation.rows_per_batch={rows_per_batch}"]
    config = compose_math([f"algorithm.prompts_per_iteration={prompts}", "algorithm.group_size=8", *sizes])
    assert (config.num_blocks, config.prompts_per_block, config.blocks_per_batch) == blocks


def test_impossible_combinations_of_grpo_are_refused():
    with pytest.raises(ConfigError, match=r"env\.block_size is 4, .* make the block a multiple of the group"):
        compose_train(["algorithm=grpo", "env.block_size=4"])
    with pytest.raises(ConfigError, match=r"env\.auto_reset is True.*set env\.auto_reset=false"):
        compose_train(["algorithm=grpo", "env.auto_reset=true"])
    with pytest.raises(ConfigError, match=r"algorithm\.min_groups is 6.*hold 4 groups"):
        compose_train(["algorithm=grpo", "env.num_envs=32"])


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


ODD_NAMES = [
    "a b",
    "größe",
    "日本",
    "a,b",
    "a=b (1)",
    "[x] {y}",
    "it's",
    'say "x"',
    "a#b&c",
    "007",
    "true",
    "a\\b's",
    "x'",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_path_may_hold_any_sign(tmp_path: Path, name: str):
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
    assert compose_train([f"warm_start.teacher={name}"]).warm_start.teacher == name


def test_a_file_may_stand_where_a_language_preset_could(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text("variants: [{min_devices: 1, items: [prompts+generation+reward+actor on all]}]")
    assert compose_math([f"plan={tmp_path / 'mine.yaml'}"]).plan.name == "mine"
    (tmp_path / "wide.yaml").write_text("# @package _global_\nalgorithm: {lr: 0.1}\nrun: {seed: 3}\n")
    with pytest.raises(ConfigError, match=r"algorithm is .*wide.yaml', which sets run as well"):
        compose_math([f"algorithm={tmp_path / 'wide.yaml'}"])


@pytest.mark.parametrize("quote", ["'", '"'])
def test_a_path_may_be_quoted(tmp_path: Path, quote: str):
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


def test_evaluation_takes_the_env_of_the_checkpoint_below_its_own_overrides():
    of_checkpoint = EnvConfig(task="PushCube-v1", obs_size=48, robot="panda_wristcam")
    mine = ["checkpoint=/some/where", "env.num_envs=16"]
    env = compose_evaluate(mine, env=of_checkpoint).env
    assert (env.task, env.obs_size, env.num_envs, env.robot) == ("PushCube-v1", 48, 16, "panda_wristcam")
    assert compose_evaluate([*mine, "env=maniskill_pick"], env=of_checkpoint).env.task == "PickCube-v1"


def test_evaluation_needs_a_policy():
    with pytest.raises(ConfigError, match="a checkpoint folder is needed"):
        compose_evaluate([])
    with pytest.raises(ConfigError, match="policy is 'exprt'"):
        compose_evaluate(["policy=exprt"])
    assert compose_evaluate(["policy=random"]).policy == "random"
