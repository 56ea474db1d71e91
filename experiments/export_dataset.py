"""Writes episodes of a checkpoint, or of the scripted expert, as a LeRobot v3 dataset, for example for algorithm=sft.

python experiments/export_dataset.py checkpoint=runs/demo/checkpoints/latest out=runs/rollouts
python experiments/export_dataset.py policy=expert env=maniskill_pick out=runs/pick
python experiments/export_dataset.py checkpoint=<teacher> env=maniskill_push out=runs/push    # cameras only record
"""

from rlinf_embodied import export
from rlinf_embodied.command_line import main
from rlinf_embodied.compose import compose_export
from rlinf_embodied.config import ExportConfig


def report(config: ExportConfig) -> None:
    found = export(config)
    print(f"{found['solved']} of {found['run']} episodes solved the task; {found['written']} written to {config.out}")


if __name__ == "__main__":
    main(report, ExportConfig, compose_export)
