"""Examines this machine for runs: one line per part, and for each problem its fix.

`python experiments/doctor.py`; exit code 0: a run can start; 1: at least one part is `broken`.  A part
that is `slow` costs speed only.
"""

import sys

from experiments.setup.vulkan import manual_instructions, nvidia_hint, probe_rendering, read_system
from rlinf_embodied.tools.doctor import Finding, State, examine, verdict


def check_vulkan() -> Finding:
    """Returns the Vulkan device that SAPIEN renders a picture with."""
    rendering = probe_rendering(picture=True)
    if not rendering.works:
        fix = f"make setup, or {manual_instructions(read_system())}"
        return Finding("Vulkan", State.broken, rendering.output, f"{nvidia_hint()} {fix}".strip())
    if "llvmpipe" not in rendering.device:
        return Finding("Vulkan", State.ok, rendering.device)
    found = f"{rendering.device} (software: a CPU renders)"
    return Finding("Vulkan", State.slow if nvidia_hint() else State.ok, found, nvidia_hint())


if __name__ == "__main__":
    # without the other commands' main, which imports what may be missing
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__, end="")
        sys.exit(0)
    if sys.argv[1:]:
        print(f"error: {sys.argv[1]} is unknown: this command has no keys", file=sys.stderr)
        sys.exit(2)
    sys.exit(verdict(examine(check_vulkan)))
