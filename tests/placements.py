"""Plans for tests, as the variants of a plan file."""

from __future__ import annotations


def on(stage: str, devices: object) -> str:
    """Returns a stage on `all`, a range, a list of numbers, or (numbers, blocks of each)."""
    if isinstance(devices, tuple):
        numbers, blocks = devices
        return f"{stage} on {','.join(map(str, numbers))} ({':'.join(map(str, blocks))})"
    return f"{stage} on {','.join(map(str, devices)) if isinstance(devices, list) else devices}"


def leaves(**devices: object) -> list[dict]:
    """Returns a plan of stages one after the other; of optional ones the name ends with `_optional`."""
    return [{"items": [on(stage.replace("_optional", "?"), where) for stage, where in devices.items()]}]


def looped(env: object, policy: object, shards: int = 1, **others: object) -> list[dict]:
    """Returns a plan of a loop of env and policy, and the other stages behind it."""
    loop = f"{on('env', env)} | {on('policy', policy)}" + (f" in {shards} shards" if shards > 1 else "")
    return [{"items": [loop, *(on(stage, where) for stage, where in others.items())]}]


def switching(variants: list[dict], *sets: str) -> list[dict]:
    """Returns a plan in which only one of these sets of stages is in memory."""
    return [{**variants[0], "exclusive": [" / ".join(sets)]}]
