"""Writes episodes of a checkpoint, or of the scripted expert, as a dataset: for ManiSkill, LeRobot, or train_sft.py.

python experiments/export_dataset.py checkpoint=runs/demo/checkpoints/latest out=runs/rollouts.h5
python experiments/export_dataset.py policy=expert env=maniskill_pick out=runs/pick.h5    actions, seeds, states
python experiments/export_dataset.py policy=expert env=maniskill_pick out=runs/pick_lerobot   a LeRobot v3 folder
python experiments/export_dataset.py checkpoint=<teacher> env=maniskill_push out=runs/push    it acts, cameras look on
"""

from rlinf_embodied.command_line import export_main
from rlinf_embodied.config import ExportConfig


def export(config: ExportConfig) -> None:
    from rlinf_embodied.embodied.export import export_dataset  # imports torch

    found = export_dataset(config, lambda done, total: print(f"episodes {done}/{total}", flush=True))
    print(f"{found.solved} of {found.run} episodes solved the task; {found.written} written to {config.out}")


if __name__ == "__main__":
    export_main(export)
