"""The reasoning workflow's graph; it imports nothing heavy, as planning does with it alone.

The diagram is in workflow.py.  Systems whose costs were published have one stage "logprob" before their learners, and
no stage for prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rlinf_embodied.planning.profile import Workload
from rlinf_embodied.workflow.graph import WHOLE, Edge, Repeat, RepeatDecision, StageSpec, WeightEdge, Workflow

_PACKAGE = __name__.rpartition(".")[0]
_CLASSES = {  # in the order of the data
    "prompts": "prompt_stage.PromptStage",
    "generation": "generation_stage.GenerationStage",
    "reward": "reward_stage.RewardStage",
    "old_log_probs": "generation_stage.LogProbStage",
    "reference": "generation_stage.LogProbStage",
    "logprob": "generation_stage.LogProbStage",
    "critic": "critic_stage.CriticStage",
    "actor": "actor_stage.ActorStage",
}
_LEARNERS = ("critic", "actor")
_NO_CONFIGS: Mapping[str, object] = {}


def reasoning_graph(
    stages: Collection[str],
    num_blocks: int,
    *,
    streams: bool,
    items_per_block: int,
    blocks_per_batch: int,
    repeat: Repeat | None = None,
    configs: Mapping[str, object] = _NO_CONFIGS,
    waiting: Collection[str] = (),
) -> Workflow:
    """Returns the graph.

    Args:
        stages: those that the algorithm needs.
        num_blocks: of an iteration.
        streams: whether the learners take answers in chunks as they are finished, and accumulate gradients over them.
        items_per_block: completions.
        blocks_per_batch: of generation.
        repeat: of dynamic sampling, see `resample`.
        configs: of the stages; without them the graph can be planned but not run.
        waiting: stages that wait for something that is none of the cluster's.
    """
    names = [name for name in _CLASSES if name in stages]
    ends = _ends(names) if "prompts" in stages else _published_ends(names)
    return Workflow(
        name="reasoning",
        num_blocks=num_blocks,
        stages={name: _spec(name, configs.get(name), blocks_per_batch, streams, name in waiting) for name in names},
        edges=tuple(Edge(a, b, granularities=() if streams or b not in _LEARNERS else (WHOLE,)) for a, b in ends),
        weight_edges=tuple(WeightEdge("actor", name) for name in ("generation", "old_log_probs") if name in names),
        repeat=repeat,
        items_per_block=items_per_block,
        more_blocks="use more algorithm.prompts_per_iteration, a smaller generation.rows_per_block and rows_per_batch",
        of_workload=f"{__name__}.of_workload",
    )


def _spec(name: str, config: object, blocks_per_batch: int, streams: bool, waits: bool) -> StageSpec:
    learns = name in _LEARNERS
    return StageSpec(
        *(name, f"{_PACKAGE}.{_CLASSES[name]}", config),
        collective=learns,
        granularities=(WHOLE,) if learns and not streams else (),
        at_once=name == "generation",
        waits=waits,
        blocks_per_batch=blocks_per_batch if name == "generation" else 1,
    )


def _ends(stages: Iterable[str]) -> list[tuple[str, str]]:
    """Returns the data edges."""
    sources = [name for name in stages if name not in ("prompts", "actor")]
    ends = [("prompts", "generation"), ("generation", "reward")]
    ends += [("generation", name) for name in ("old_log_probs", "reference", "critic") if name in sources]
    ends += [("reward", "critic")] if "critic" in sources else []
    return [*ends, *((name, "actor") for name in sources)]


def _published_ends(stages: Collection[str]) -> list[tuple[str, str]]:
    ends = [
        *(("generation", "reward"), ("generation", "logprob"), ("reward", "critic"), ("logprob", "critic")),
        *(("logprob", "actor"), ("critic", "actor")),
    ]
    if "critic" not in stages:
        ends.append(("reward", "actor"))
    return [(a, b) for a, b in ends if a in stages and b in stages]


def of_workload(work: Workload, stages: Collection[str]) -> Workflow:
    """Returns the graph that a profile was measured for.

    Where there is a critic, more than one optimizer step (whose ratio needs old log-probs) or a repeat, the learners
    wait for all answers; those of published systems do not.
    """
    waits = "prompts" in stages and (work.max_rounds > 1 or bool({"critic", "old_log_probs"} & set(stages)))
    again = (
        resample(lambda rounds: RepeatDecision(True), work.max_rounds) if work.max_rounds > 1 else None
    )  # nothing runs
    return reasoning_graph(
        stages,
        work.num_items // work.items_per_block,
        streams=not waits,
        items_per_block=work.items_per_block,
        blocks_per_batch=work.blocks_per_batch,
        repeat=again,
    ).with_rounds(work.expected_rounds)


def resample(decide: Callable[[Sequence[Sequence[object]]], RepeatDecision], max_rounds: int) -> Repeat:
    """Returns the repeat of dynamic sampling: all that comes before the actor, until `decide` has enough groups."""
    return Repeat("resample", "actor", "reward", decide, max_rounds)
