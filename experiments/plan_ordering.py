"""Which kind of plan wins on 8, 16 and 32 GPUs, for the profiles made of published numbers, and how surely.

python experiments/plan_ordering.py            # orderings, and how far each number can move at 8 GPUs
python experiments/plan_ordering.py quick      # orderings and planning times only
"""

import sys
import time
from dataclasses import replace

from published import WINNERS, h100

from rlinf_embodied.compose import CONFIG_DIR
from rlinf_embodied.flow import planner, shares
from rlinf_embodied.flow.catalogue import workflow_for
from rlinf_embodied.flow.pricing import Pricer
from rlinf_embodied.flow.profile import Profile
from rlinf_embodied.flow.profile_file import load_profile
from rlinf_embodied.flow.sensitivity import MODES, times_by_mode, turning_points, winner


def main(quick: bool) -> None:
    profiles = {name: load_profile(CONFIG_DIR / "profiles" / f"{name}.json") for name in WINNERS}
    print(
        "| profile | GPUs | "
        + " | ".join(f"{mode} s" for mode in MODES)
        + " | wins | published | auto s | worst / auto |"
    )
    print("|---|---|" + "---|" * (len(MODES) + 4))
    for name, profile in profiles.items():
        for num_devices in (8, 16, 32):
            print_ordering(name, profile, num_devices)
    print("\n| workflow | devices | planning CPU s |\n|---|---|---|")
    for name in ("maniskill_openvla", "ppo_llm"):
        for num_devices in (8, 64, 1024, 4096):
            print_planning_time(name, scaled(profiles[name], num_devices), num_devices)
    print("\n| workflow | devices | mode | coarse s | every device s | cost |\n|---|---|---|---|---|---|")
    for name in WINNERS:
        for mode in (planner.Mode.any, planner.Mode.hybrid, planner.Mode.spatial):
            print_coarsening(name, profiles[name], 32, mode)
    if not quick:
        print("\n| profile at 8 GPUs | number | another mode wins below | above |\n|---|---|---|---|")
        for name, profile in profiles.items():
            for turn in turning_points(workflow_for(profile), profile, h100(8)):
                ends = ["never (x 0.1)" if turn.below is None else f"x {turn.below[0]} ({turn.below[1]})"]
                ends.append("never (x 10)" if turn.above is None else f"x {turn.above[0]} ({turn.above[1]})")
                print(f"| {name} | {turn.what} | {ends[0]} | {ends[1]} |", flush=True)


def scaled(profile: Profile, num_devices: int) -> Profile:
    """The same work per device as at 8 GPUs: plans for thousands of devices are for thousands of times the work."""
    assert profile.workload is not None
    return replace(
        profile, workload=replace(profile.workload, num_items=profile.workload.num_items * max(1, num_devices // 8))
    )


def print_ordering(name: str, profile: Profile, num_devices: int) -> None:
    work, cluster = workflow_for(profile), h100(num_devices)
    times = times_by_mode(work, profile, cluster)
    auto = planner.find_plans(Pricer(work, profile, cluster))[0].iteration_s
    cells = " | ".join(f"{times[mode]:.1f}" for mode in MODES)
    worst = max(seconds for seconds in times.values() if seconds < float("inf"))
    print(f"| {name} | {num_devices} | {cells} | {winner(times)} | {WINNERS[name]} | {auto:.1f} | {worst / auto:.2f} |")


def print_planning_time(name: str, profile: Profile, num_devices: int) -> None:
    pricer = Pricer(workflow_for(profile), profile, h100(num_devices))
    start = time.process_time()
    planner.find_plans(pricer)
    print(f"| {name} | {num_devices} | {time.process_time() - start:.3f} |", flush=True)


def print_coarsening(name: str, profile: Profile, num_devices: int, mode: planner.Mode) -> None:
    """Compares the search over coarse shares with the one over every number of devices."""
    work, cluster = workflow_for(profile), h100(num_devices)
    coarse = planner.find_plans(Pricer(work, profile, cluster), mode, width=4)[0].iteration_s
    kept, shares.EXACT_DEVICES = shares.EXACT_DEVICES, num_devices
    exact = planner.find_plans(Pricer(work, profile, cluster), mode, width=4)[0].iteration_s
    shares.EXACT_DEVICES = kept
    print(f"| {name} | {num_devices} | {mode} | {coarse:.2f} | {exact:.2f} | {coarse / exact - 1:+.2%} |", flush=True)


if __name__ == "__main__":
    main("quick" in sys.argv[1:])
