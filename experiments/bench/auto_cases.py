"""The workloads of the benchmark of plan=auto: configs that a user may meet, each with the kind of plan that it is for.

workload       what it is about
pick...        linear costs on two equal cores: collocated
robot          envs that run at the rate of a robot's controller: workers without a core, two shards in flight
robot_reuse    slower robots, and three times the epochs on what they gather: training during the next rollout
flat_policy    a policy whose call takes as long for one row as for sixteen, with a simulator on the CPU
math_tail      completions most of which end early
math_memory    devices that hold one of two stages
math_judge     a reward that waits for an external judge
"""

from __future__ import annotations

_SHORT = "env.chunks_per_rollout=10 warm_start.num_demos=24 warm_start.epochs=2 warm_start.head_epochs=4"
_LARGE = "policy.options.hidden_size=256 policy.options.num_layers=4 policy.options.stem_width=96"
# sixteen robots, each with a camera that a frozen stem of some size looks through; every iteration of learning does as
# much as the next one: no early end
_ROBOTS = """env=point_reach warm_start.num_demos=24 warm_start.epochs=1 env.obs_size=128 env.num_envs=16
    env.block_size=4 cluster.waiting_devices=4 algorithm.target_kl=null"""
_WORDS = {
    "pick": f"env=maniskill_pick {_SHORT}",
    "pick_large": f"env=maniskill_pick {_SHORT} {_LARGE}",
    # as near to state alone as a policy that sees can be: small images cost next to nothing
    "pick_state": f"""env=maniskill_pick {_SHORT} env.obs_size=16
        policy.options.stem_width=16 policy.options.keypoints=4""",
    # chunks of ten actions: twice the physics for each image and each answer
    "cpu_heavy": f"env=maniskill_pick {_SHORT} env.chunk=10 env.chunks_per_rollout=5 env.obs_size=32",
    "policy_heavy": f"env=point_reach warm_start.num_demos=24 warm_start.epochs=1 {_LARGE} env.obs_size=64",
    "point_reach": "env=point_reach warm_start.num_demos=48 warm_start.epochs=4 env.chunks_per_rollout=20",
    "robot": f"{_ROBOTS} policy.options.stem_width=256 env.control_hz=30",
    "robot_reuse": f"""{_ROBOTS} policy.options.stem_width=128 env.control_hz=15
        algorithm.epochs=12 algorithm.value_epochs=24""",
    "math_grpo": "workflow=reasoning warm_start.steps=400",
    "math_ppo": "workflow=reasoning algorithm=ppo warm_start.steps=400 algorithm.critic_warmup_iterations=1",
    # sums of two to four terms, and a quarter of ten: most completions end early, a few take four times as long
    "math_tail": """workflow=reasoning warm_start.steps=400 data.level='sum2-2-9,sum3-3-9,sum4-4-9,sum10-10-9'
        generation.max_new_tokens=96 generation.rows_per_block=16 generation.rows_per_batch=128""",
    # 103 million weights are read for each call, for one row or sixteen, and the simulator takes time itself
    "flat_policy": """env=maniskill_pick policy=state policy.options.hidden_size=7168 policy.options.num_layers=3
        algorithm=ppo_dense env.num_envs=32 env.block_size=16 env.chunk=2 env.chunks_per_rollout=25
        algorithm.num_minibatches=1 algorithm.epochs=1 algorithm.value_epochs=1""",
    # devices that hold the actor or the critic with what a step of theirs needs, and not both: they switch, or each has
    # a separate device.  The simulated accelerator (docs/gpu.md): PYTHONPATH=tests:. SIM_ROOM_BYTES=175000000
    "math_memory": """workflow=reasoning algorithm=ppo warm_start.steps=100 algorithm.critic_warmup_iterations=0
        policy.hidden_size=256 policy.intermediate_size=1024 algorithm.reduction=exact
        cluster.torch_device=sim cluster.device_module=simulated_accelerator cluster.num_devices=2
        cluster.device_memory_bytes=175000000""",
    # rewards are given by a judge behind HTTP that thinks for 0.1 s; sixteen questions of each worker at once
    "math_judge": """workflow=reasoning warm_start.steps=400 policy.hidden_size=192 policy.intermediate_size=512
        generation.rows_per_block=32 reward._target_=experiments.examples.http_judge.judged
        reward.concurrency=16 reward.waits=true cluster.waiting_devices=2""",
}
CASES = {name: tuple(words.split()) for name, words in _WORDS.items()}
_OF_LEARNERS = ("collocated", "disaggregated", "hybrid", "experiments/bench/learners_apart.yaml")
# presets: few workers that wait for their turn are enough for two cores, and workers with optimizers of 103 million
# weights for 24 GiB
FEW = {
    "robot": ("collocated", "disaggregated"),
    "robot_reuse": ("collocated", "disaggregated"),
    "math_judge": ("collocated", "pipelined"),
    "flat_policy": ("collocated", "hybrid"),
    "math_memory": _OF_LEARNERS,
}
