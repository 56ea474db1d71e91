"""Serves an env to env=remote of other processes and machines (docs/serving.md): a simulator, or a robot's `Simulator`.

python experiments/serve_env.py env=maniskill_pick
python experiments/serve_env.py checkpoint=runs/demo/checkpoints/latest host=0.0.0.0    the env that it was trained in
python experiments/evaluate.py policy=expert env=remote env.options.url=ws://localhost:8100 env.task=PickCube-v1
"""

from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose_serve_env
from rlinf_embodied.config import ServeEnvConfig


def serve(config: ServeEnvConfig) -> None:
    from envs.served import serve_env  # these import torch, which is pinned first
    from rlinf_embodied.runtime.session import find_cluster

    serve_env(config, find_cluster(config.cluster).torch_device(0))


if __name__ == "__main__":
    main(serve, ServeEnvConfig, compose_serve_env)
