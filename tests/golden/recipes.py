"""Small computations that touch every stage, each with digests of what it gives, in order of computation."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from safetensors.torch import load_file

from experiments.bench.harness.trainings import COLLOCATED, digest_of, in_this_process, iterations, job_of, one_device
from policies.vision import MAPS, of_cameras
from rlinf_embodied.algorithms.demonstrations import Demonstrations
from rlinf_embodied.compose import compose_math, compose_train
from rlinf_embodied.config import MathConfig, TrainConfig
from rlinf_embodied.embodied import workflow as embodied
from rlinf_embodied.embodied.env_stage import make_env
from rlinf_embodied.embodied.fine_tuning import FineTuningLearner, fine_tuning_stage
from rlinf_embodied.embodied.policy_folder import save_policy
from rlinf_embodied.embodied.sources import NUM_DATA_BLOCKS, sources_of
from rlinf_embodied.embodied.warm_start import NewPolicyConfig, NewPolicyStage, fine_tuning_of
from rlinf_embodied.errors import ConfigError
from rlinf_embodied.interfaces.policies import Features, Policy
from rlinf_embodied.plug_ins import load_target
from rlinf_embodied.randomness import reset_seed
from rlinf_embodied.reasoning import workflow as reasoning
from rlinf_embodied.reasoning.fine_tuning import starting_policy
from rlinf_embodied.runtime.host import StepContext, solo_context
from rlinf_embodied.runtime.session import SerialSession
from rlinf_embodied.workflow.graph import Workflow
from tests.observations import stacked


def _maps(features: Features) -> torch.Tensor:
    return torch.stack(of_cameras(features, MAPS), 1)


def _words(text: str) -> list[str]:
    return text.split()


_VLA = """
    cluster=serial run.seed=3 env.obs_size=32
    policy.options.hidden_size=32 policy.options.num_layers=1 policy.options.num_heads=2 policy.options.num_bins=9
    policy.options.stem_width=16 policy.options.keypoints=4 policy.options.critic_hidden_size=32
    policy.options.instruction_length=8 policy.temperature=0.6
    algorithm.epochs=2 algorithm.num_minibatches=2 algorithm.value_epochs=2 algorithm.lr=1e-3 algorithm.target_kl=null
    algorithm.gamma=0.97 algorithm.gae_lambda=0.95 algorithm.critic_warmup_iterations=0
"""
CLONE = _words(f"""
    env=point_reach {_VLA}
    run.tensorboard=false env.num_envs=16 env.block_size=4 env.chunk=4 env.horizon=12 env.chunks_per_rollout=4
    warm_start.num_demos=32 warm_start.noise=[0.0,0.1] warm_start.epochs=2 warm_start.head_epochs=4
    warm_start.batch_size=16 warm_start.head_batch_size=16 warm_start.lr=1e-3 warm_start.head_lr=5e-3
""")
PICK = _words(f"""
    env=maniskill_pick {_VLA}
    run.tensorboard=false
    env.num_envs=4 env.block_size=2 env.chunk=5 env.horizon=50 env.chunks_per_rollout=10 env.hold_steps=1
""")
LANGUAGE = _words("""
    data.level=sum1-2-9 cluster=serial plan=collocated run.seed=3
    policy.hidden_size=32 policy.num_layers=1 policy.num_heads=2 policy.intermediate_size=64 policy.context_length=40
    generation.max_new_tokens=20 generation.rows_per_block=8 generation.rows_per_batch=16 generation.max_num_seqs=16
    algorithm.prompts_per_iteration=8 algorithm.group_size=4 algorithm.lr=1e-3 algorithm.tokens_per_microbatch=256
    warm_start.steps=240 warm_start.chain_of_thought_share=0.2 warm_start.num_examples=1024 warm_start.lr=1e-2
""")


@dataclass(slots=True)
class Stages:
    """Digests of a recipe in order; `disturbed` is the stage in which a bit is changed."""

    disturbed: str | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, *values: object) -> None:
        """Notes SHA-256 of tensors, arrays, or numbers; the last bit of the first changes where it is disturbed."""
        digest = hashlib.sha256()
        for value in values:
            array = np.ascontiguousarray(np.asarray(value))
            content = bytearray(array.tobytes())
            if name == self.disturbed and content:
                content[0] ^= 1
            digest.update(f"{array.dtype}{array.shape}".encode() + bytes(content))
        self.digests[name] = digest.hexdigest()[:16]

    def add_iterations(self, name: str, config: TrainConfig | MathConfig, workflow: Workflow, trees: Sequence) -> None:
        """Trains for two iterations in this process and notes metrics that are no times, and weights."""
        with in_this_process(workflow, trees) as executor:
            for number, (_, metrics) in enumerate(iterations(job_of(config), executor, 2)):
                for group in ("rollout", "losses"):
                    found = [value for key, value in sorted(metrics.items()) if key.startswith(f"{group}/")]
                    self.add(f"{name} {number + 1}: {group}", found)
                self.add(f"{name} {number + 1}: weights", list(digest_of(executor).encode()))


def clone(stages: Stages) -> None:
    """Demonstrations and a clone of the toy's expert, then two iterations of PPO on it."""
    config = compose_train(CLONE)
    tuned = fine_tuning_of(config)
    with tempfile.TemporaryDirectory() as folder:
        _untrained(config, folder)
        learner = FineTuningLearner(fine_tuning_stage(tuned, sources_of(tuned), folder))
        learner.setup(solo_context(range(NUM_DATA_BLOCKS)))
    for number in range(learner.open_sources(StepContext(0))):
        learner.collect(StepContext(number))
    learner.prepare(StepContext(0))
    module, data = learner.shared.policy.module, cast("dict[int, Demonstrations]", learner._data).values()
    stages.add("initial weights", *_weights(module))
    stages.add("demonstrations", *(part.actions for part in data))
    stages.add("images", *(stacked(part.observation) for part in data))
    first, last, losses = config.warm_start.epochs, tuned.run.num_iterations, list[float]()
    for number in range(last):
        report = learner.run(StepContext(number), {}).report
        losses.append(cast("dict[str, float]", report)["losses/imitation_loss"])
        if number + 1 == first:
            stages.add("losses of the whole", losses)
            stages.add("cloned weights", *_weights(module))
            losses = []
        if number == first:
            stages.add("features", *(_maps(part) for part in learner._made._features.values()))
    stages.add("losses of the head", losses)
    stages.add("weights of the clone", *_weights(module))
    with tempfile.TemporaryDirectory() as folder:
        learner.save_policy(StepContext(0), folder)
        stages.add_iterations("PPO", config, embodied.training_workflow(config, folder), COLLOCATED)


def _untrained(config: TrainConfig, folder: str) -> None:
    stage = NewPolicyStage(NewPolicyConfig(config.env, config.policy, config.run.seed, measures=False))
    stage.setup(solo_context((0,)))
    stage.save_policy(StepContext(0), folder)


def pick(stages: Stages) -> None:
    """Two iterations of PPO on PickCube from an untrained policy, after the expert has grasped in its simulator."""
    config = compose_train(PICK)
    env = make_env(replace(config.env, auto_reset=False, hold_steps=0), 4, "cpu")
    observation = env.reset([int(reset_seed(3, number)) for number in range(4)], list(range(4)))
    stages.add("states at reset", observation.proprio, observation.privileged)
    stages.add("images at reset", stacked(observation))
    for number in range(6):
        observation = env.step_chunk(lambda _: env.expert_actions().clamp(-1.0, 1.0)).observation
        stages.add(f"states after chunk {number}", observation.proprio, observation.privileged)
        stages.add(f"images after chunk {number}", stacked(observation))
    policy = load_target(config.policy._target_)(config.policy, env.spec, config.run.seed)
    stages.add("features", _maps(policy.encode(observation)))  # pyright: ignore[reportAttributeAccessIssue]
    env.close()
    with tempfile.TemporaryDirectory() as folder:
        save_policy(cast(Policy, policy), Path(folder), config.env, config.policy)
        stages.add_iterations("PPO", config, embodied.training_workflow(config, folder), COLLOCATED)


def language(stages: Stages) -> None:
    """A tiny language model is fine-tuned and then trained by two iterations of GRPO."""
    config, losses = compose_math(LANGUAGE), list[str]()
    with tempfile.TemporaryDirectory() as cache, _cached_in(cache):
        config.warm_start.cache_dir = cache
        folder = starting_policy(config, SerialSession(), one_device(), lambda *said: losses.append(said[-1]))
        stages.add("losses of the fine-tuning", list(" ".join(losses).encode()))
        saved = load_file(folder / "model.safetensors")
        stages.add("fine-tuned weights", *(tensor for _, tensor in sorted(saved.items())))
        workflow = reasoning.training_workflow(config, str(folder))
        stages.add_iterations("GRPO", config, workflow, config.plan.variants)


@contextmanager
def _cached_in(folder: str) -> Iterator[None]:
    """Caches lie in a separate folder for a while: nothing that another processor made is found."""
    before = os.environ.get("RLINF_EMBODIED_CACHE")
    os.environ["RLINF_EMBODIED_CACHE"] = folder
    try:
        yield
    finally:
        del os.environ["RLINF_EMBODIED_CACHE"]
        if before is not None:
            os.environ["RLINF_EMBODIED_CACHE"] = before


def _weights(module: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in module.parameters()]


RECIPES: Mapping[str, Callable[[Stages], None]] = {"clone": clone, "language": language, "pick": pick}


def digests(recipe: str, disturbed: str | None = None) -> dict[str, str]:
    """Returns the digests of a recipe's stages, in order; one thread, whatever the environment says.

    Raises:
        ConfigError: `disturbed` is no stage of it.
    """
    torch.set_num_threads(1)
    stages = Stages(disturbed)
    RECIPES[recipe](stages)
    if disturbed is not None and disturbed not in stages.digests:
        raise ConfigError(f"disturb names the stage {disturbed!r}, but {recipe} has {', '.join(stages.digests)}")
    return stages.digests
