"""Compares this machine's bits with those in the repository, stage by stage, and names the first stage that differs.

python experiments/golden.py                       all recipes against tests/golden/*.json; exit code 1 if one differs
python experiments/golden.py recipe=clone,language some of them: clone, language, pick
python experiments/golden.py write=true            writes the files anew, after a change of code that changes weights

    clone      a toy env and a small VLA: demonstrations, pictures, features, losses, weights of a clone; two iterations
               of PPO
    language   two iterations of GRPO on a tiny language model: its start, what it wrote, losses, weights
    pick       ManiSkill's PickCube with physics and pictures: states, pictures, features, weights after an update

Stages are in order of computation, so the first one that differs is where to look.  `disturb=<recipe>/<stage>` changes
a bit there, to see that it is named; `pinned=false` computes with this machine's own kernels; `out=<folder>` keeps the
digests as <folder>/<recipe>.json.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlinf_embodied import portable
from rlinf_embodied.errors import ConfigError

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden"


@dataclass(slots=True)
class Stages:
    """Digests of a recipe in order; `disturbed` is the stage in which a bit is changed."""

    disturbed: str | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, *values: object) -> None:
        """Notes SHA-256 of tensors, arrays, or numbers; the last bit of the first changes where it is disturbed."""
        import numpy as np

        digest = hashlib.sha256()
        for value in values:
            array = np.ascontiguousarray(np.asarray(value))
            content = bytearray(array.tobytes())
            if name == self.disturbed and content:
                content[0] ^= 1
            digest.update(f"{array.dtype}{array.shape}".encode() + bytes(content))
        self.digests[name] = digest.hexdigest()[:16]


def first_difference(found: Mapping[str, str], expected: Mapping[str, str]) -> str | None:
    """Returns the first stage whose digest differs or is missing, None if there is none."""
    names = [*expected, *(name for name in found if name not in expected)]
    return next((name for name in names if found.get(name) != expected.get(name)), None)


# ---- recipes
_POLICY = (
    "policy.hidden_size=32",
    "policy.num_layers=1",
    "policy.num_heads=2",
    "policy.stem_width=16",
    "policy.keypoints=4",
    "policy.num_bins=9",
    "policy.critic_hidden_size=32",
    "policy.instruction_length=8",
    "policy.temperature=0.6",
)
_PPO = (
    "algorithm.epochs=2",
    "algorithm.num_minibatches=2",
    "algorithm.value_epochs=2",
    "algorithm.lr=1e-3",
    "algorithm.target_kl=null",
    "algorithm.gamma=0.97",
    "algorithm.gae_lambda=0.95",
    "algorithm.critic_warmup_iterations=0",
)
CLONE = (
    "env=point_reach",
    "cluster=serial",
    "run.seed=3",
    "env.num_envs=16",
    "env.block_size=4",
    "env.obs_size=32",
    "env.chunk=4",
    "env.horizon=12",
    "env.chunks_per_rollout=4",
    *_POLICY,
    *_PPO,
    "warm_start.num_demos=32",
    "warm_start.noise=[0.0,0.1]",
    "warm_start.epochs=2",
    "warm_start.head_epochs=4",
    "warm_start.batch_size=16",
    "warm_start.head_batch_size=16",
    "warm_start.lr=1e-3",
    "warm_start.head_lr=5e-3",
)
PICK = (
    "env=maniskill_pick",
    "cluster=serial",
    "run.seed=3",
    "env.num_envs=4",
    "env.block_size=2",
    "env.obs_size=32",
    "env.chunk=5",
    "env.horizon=50",
    "env.chunks_per_rollout=10",
    "env.hold_steps=1",
    *_POLICY,
    *_PPO,
)
LANGUAGE = (
    "data.level=sum1-2-9",
    "cluster=serial",
    "plan=collocated",
    "run.seed=3",
    "policy.hidden_size=32",
    "policy.num_layers=1",
    "policy.num_heads=2",
    "policy.intermediate_size=64",
    "policy.context_length=40",
    "generation.max_new_tokens=20",
    "generation.rows_per_block=8",
    "generation.rows_together=16",
    "generation.num_slots=16",
    "algorithm.prompts_per_iteration=8",
    "algorithm.group_size=4",
    "algorithm.lr=1e-3",
    "algorithm.tokens_per_microbatch=256",
    "warm_start.steps=240",
    "warm_start.worked_share=0.2",
    "warm_start.num_examples=1024",
    "warm_start.lr=1e-2",
)


def clone(stages: Stages) -> None:
    """Demonstrations and a clone of the toy's expert, then two iterations of PPO on it."""
    from rlinf_embodied.compose import compose_train
    from rlinf_embodied.embodied.warm_start_stage import NUM_DATA_BLOCKS, WarmStartStage, WarmStartStageConfig
    from rlinf_embodied.learning.groups import SoloGroup
    from rlinf_embodied.runtime.host import StageContext, Tick

    config = compose_train(CLONE)
    stage = WarmStartStage(WarmStartStageConfig((config.env,), config.policy, config.warm_start, config.run.seed))
    blocks = tuple(range(NUM_DATA_BLOCKS))
    owners = (0,) * len(blocks)
    context = StageContext(0, "cpu", blocks, (blocks,), len(blocks), owners, SoloGroup(), {})
    for number in range(stage.setup(context)):
        stage.collect(Tick(number))
    stage.prepare(Tick(0))
    data = stage._blocks_data.values()
    stages.add("initial weights", *_weights(stage._policy.module))
    stages.add("demonstrations", *(part.actions for part in data))
    stages.add("pictures", *(part.observation.images for part in data))
    for whole, epochs in ((True, config.warm_start.epochs), (False, config.warm_start.head_epochs)):
        stage.begin_phase(Tick(0), whole)
        if not whole:
            stages.add("features", *(part["maps"] for part in stage._features.values()))
        losses = [stage.fit_epoch(Tick(epoch)) for epoch in range(epochs)]
        stages.add("losses of the whole" if whole else "losses of the head", losses)
        stages.add("cloned weights" if whole else "weights of the clone", *_weights(stage._policy.module))
    with tempfile.TemporaryDirectory() as folder:
        stage.save(Tick(0), folder)
        _reinforce(stages, config, folder)


def pick(stages: Stages) -> None:
    """One iteration of PPO on PickCube from an untrained policy, after the expert has grasped in the same simulator."""
    from dataclasses import replace

    from rlinf_embodied.compose import compose_train
    from rlinf_embodied.embodied.env_stage import make_env
    from rlinf_embodied.embodied.policy_folder import save_policy
    from rlinf_embodied.randomness import reset_seed
    from rlinf_embodied.targets import load_target

    config = compose_train(PICK)
    env = make_env(replace(config.env, auto_reset=False, hold_steps=0), 4, "cpu")
    observation = env.reset([int(reset_seed(3, number)) for number in range(4)], list(range(4)))
    stages.add("states at reset", observation.proprio, observation.privileged)
    stages.add("pictures at reset", observation.images)
    for number in range(6):
        observation = env.step_chunk(lambda _: env.expert_actions().clamp(-1.0, 1.0)).observation
        stages.add(f"states after chunk {number}", observation.proprio, observation.privileged)
        stages.add(f"pictures after chunk {number}", observation.images)
    policy = load_target(config.policy._target_)(config.policy, env.spec, config.run.seed)
    stages.add("features", policy.encode(observation)["maps"])  # pyright: ignore[reportAttributeAccessIssue]
    env.close()
    with tempfile.TemporaryDirectory() as folder:
        save_policy(policy, Path(folder), config.env, config.policy)  # pyright: ignore[reportArgumentType]
        _reinforce(stages, config, folder)


def _reinforce(stages: Stages, config, folder: str, iterations: int = 2) -> None:
    from rlinf_embodied.cluster.hardware import Cluster
    from rlinf_embodied.embodied.workflow import run_iteration, training_workflow
    from rlinf_embodied.execution.executor import Executor
    from rlinf_embodied.flow.plan import resolve
    from rlinf_embodied.runtime.session import SerialSession

    workflow = training_workflow(config, folder)
    loop = {"name": "rollout", "shards": 1, "stages": {"env": "all", "policy": "all"}}
    plan = [{"tree": {"temporal": [{"loop": loop}, {"leaf": {"stage": "actor", "devices": "all"}}]}}]
    cluster = Cluster("golden", "cpu", 1, 1, 0)
    session = SerialSession()
    executor = Executor(workflow, resolve("golden", plan, 1, workflow), session, cluster)
    for number in range(iterations):
        _note_iteration(stages, "PPO", executor, number, run_iteration(executor, number)[1])
    session.close()


def _note_iteration(stages: Stages, name: str, executor, number: int, metrics: Mapping[str, float]) -> None:
    from rlinf_embodied.runtime.host import Tick

    timed = ("time/", "charts/")
    kept = {key: value for key, value in metrics.items() if not key.startswith(timed)}
    for group in ("rollout", "losses"):
        values = [value for key, value in sorted(kept.items()) if key.startswith(f"{group}/")]
        stages.add(f"{name} {number + 1}: {group}", values)
    (digest,) = set(executor.call("actor", "weights_digest", Tick(0)))
    stages.add(f"{name} {number + 1}: weights", list(str(digest).encode()))


def language(stages: Stages) -> None:
    """A tiny language model is fine-tuned and then trained by two iterations of GRPO."""
    from rlinf_embodied.cluster.hardware import Cluster
    from rlinf_embodied.compose import compose_math
    from rlinf_embodied.execution.executor import Executor
    from rlinf_embodied.flow.plan import resolve
    from rlinf_embodied.reasoning.job import ReasoningJob
    from rlinf_embodied.reasoning.warm_start import starting_policy
    from rlinf_embodied.reasoning.workflow import training_workflow
    from rlinf_embodied.runtime.session import SerialSession
    from rlinf_embodied.training.job import Progress

    config = compose_math(LANGUAGE)
    session, cluster = SerialSession(), Cluster("golden", "cpu", 1, 1, 0)
    with tempfile.TemporaryDirectory() as cache:
        config.warm_start.cache_dir = cache
        losses: list[str] = []
        with _cache_in(cache):
            folder = starting_policy(config, session, cluster, lambda *said: losses.append(said[-1]))
        stages.add("losses of the fine-tuning", list(" ".join(losses).encode()))
        stages.add("fine-tuned weights", *_saved(folder))
        workflow = training_workflow(config, str(folder))
        executor = Executor(workflow, resolve("golden", config.plan.trees, 1, workflow), session, cluster)
        job, progress = ReasoningJob(config), Progress()
        for number in range(2):
            _note_iteration(stages, "GRPO", executor, number, job.run_iteration(executor, progress)[1])
            progress.iteration += 1
    session.close()


class _cache_in:  # noqa: N801 - reads as a function
    """Caches lie in a folder of their own for a while: nothing that another processor made is found."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        import os

        self._before = os.environ.get("RLINF_EMBODIED_CACHE")
        os.environ["RLINF_EMBODIED_CACHE"] = self._folder

    def __exit__(self, *error: object) -> None:
        import os

        del os.environ["RLINF_EMBODIED_CACHE"]
        if self._before is not None:
            os.environ["RLINF_EMBODIED_CACHE"] = self._before


def _weights(module) -> list[object]:
    return [parameter.detach() for parameter in module.parameters()]


def _saved(folder: Path) -> list[object]:
    from safetensors.torch import load_file

    return [tensor for _, tensor in sorted(load_file(folder / "model.safetensors").items())]


RECIPES: dict[str, Callable[[Stages], None]] = {"clone": clone, "language": language, "pick": pick}


# ---- command
def digests(recipe: str, disturbed: str | None = None) -> dict[str, str]:
    """Returns the digests of a recipe's stages, in order; one thread, whatever the environment says."""
    import torch

    torch.set_num_threads(1)
    stages = Stages(disturbed)
    RECIPES[recipe](stages)
    if disturbed is not None and disturbed not in stages.digests:
        raise ConfigError(f"disturb names the stage {disturbed!r}, but {recipe} has {', '.join(stages.digests)}")
    return stages.digests


def compare(recipe: str, found: Mapping[str, str]) -> str | None:
    """Returns a line that names the first stage which differs from the file, None if all are the same."""
    path = FOLDER / f"{recipe}.json"
    if not path.exists():
        return f"{recipe}: there is no {path}: write it by python experiments/golden.py recipe={recipe} write=true"
    expected = json.loads(path.read_text())
    name = first_difference(found, expected)
    if name is None:
        return None
    here, there = found.get(name), expected.get(name)
    return f"{recipe}: the first stage that differs is {name!r}: {here} here, {there} in {path.name}"


def main(arguments: Sequence[str]) -> int:
    given = dict(text.split("=", 1) for text in arguments)
    unknown = set(given) - {"recipe", "write", "disturb", "pinned", "out"}
    names = [*RECIPES] if given.get("recipe", "all") == "all" else given["recipe"].split(",")
    if unknown or not set(names) <= set(RECIPES):
        known = f"recipe={','.join(RECIPES)}, write, disturb, pinned, out"
        print(f"error: known are {known}, not {' '.join(arguments)}", file=sys.stderr)
        return 2
    if given.get("pinned", "true") == "true":
        portable.pin()
        portable.verify()
    recipe_disturbed, _, stage_disturbed = given.get("disturb", "").partition("/")
    wrong = 0
    for name in names:
        found = digests(name, stage_disturbed if name == recipe_disturbed else None)
        if "out" in given:
            Path(given["out"]).mkdir(parents=True, exist_ok=True)
            (Path(given["out"]) / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        if given.get("write") == "true":
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
            continue
        said = compare(name, found)
        wrong += said is not None
        print(said or f"{name}: {len(found)} stages are the same", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
