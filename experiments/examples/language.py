"""One policy cloned on pick, push and pull; a table of what it does under every instruction in every scene.

python -m experiments.examples.language run.dir=runs/language warm_start.num_demos=450

Goals are neither shown in the images nor told in the proprioception, and every scene is seen from the same place, so
that push and pull look alike and the words have to decide.  (PickCube's cube is red, that of the others blue.)
"""

import time
from dataclasses import asdict, replace
from pathlib import Path

from rlinf_embodied.command_line import main
from rlinf_embodied.config import EnvConfig, TrainConfig

TASKS = ("PickCube-v1", "PushCube-v1", "PullCube-v1")
INSTRUCTIONS = ("pick up the cube", "push the cube to the goal", "pull the cube to the goal")


def scenes(config: TrainConfig) -> list[EnvConfig]:
    # one view of all scenes (PickCube's own), or the camera tells push from pull
    same = {
        "show_goal": False,
        "goal_in_proprio": False,
        "camera_eye": [0.3, 0.0, 0.6],
        "camera_target": [-0.1, 0.0, 0.1],
    }
    return [replace(config.env, task=task, **same) for task in TASKS]


def table(config: TrainConfig) -> int:
    from rlinf_embodied.embodied.language import BEHAVIOURS, behaviour_table
    from rlinf_embodied.embodied.policy_folder import load_policy
    from rlinf_embodied.embodied.warm_start import WarmStartStageConfig, warm_start
    from rlinf_embodied.runtime.discovery import find_cluster
    from rlinf_embodied.runtime.sessions import make_session
    from rlinf_embodied.telemetry.live import LiveView
    from rlinf_embodied.telemetry.run_folder import RunFolder
    from rlinf_embodied.telemetry.tables import markdown_table

    folder = RunFolder(Path(config.run.dir or f"runs/language-{time.strftime('%Y%m%d-%H%M%S')}"))
    session = make_session(config.cluster)
    stage = WarmStartStageConfig(tuple(scenes(config)), config.policy, config.warm_start, config.run.seed)
    try:
        with LiveView(0, "language") as view:
            cluster = find_cluster(config.cluster)
            clone = warm_start(stage, session, cluster, view.progress, folder.path)
    finally:
        session.close()
    policy = load_policy(config.policy, str(clone), "cpu").policy
    rows = behaviour_table(policy, scenes(config), INSTRUCTIONS, config.eval.num_envs, config.eval.seed)
    cells = [(row.scene, row.instruction, *(f"{100 * row.shares[name]:.0f} %" for name in BEHAVIOURS)) for row in rows]
    text = markdown_table(("scene", "instruction", *BEHAVIOURS), cells)
    print(text)
    folder.write_text("language.md", text + "\n")
    folder.write_json("language.json", [asdict(row) for row in rows])
    print(f"written to {folder.path / 'language.md'}")
    return 0


if __name__ == "__main__":
    main(table, TrainConfig)
