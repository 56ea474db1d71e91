"""The reasoning workflow's graph; it imports nothing heavy, as planning does with it alone.

The diagram is in workflow.py.  Systems whose costs were published have one stage "logprob" before their learners, and
no stage for prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from rlinf_embodied.planning.profile import Workload
from rlinf_embodied.workflow.graph import Edge, Repeat, RepeatDecision, StageSpec, WeightEdge, Workflow

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
_PUBLISHED = (
    *(("generation", "reward"), ("generation", "logprob"), ("reward", "critic"), ("logprob", "critic")),
    *(("logprob", "actor"), ("critic", "actor")),
)


def reasoning_graph(
    stages: Collection[str],
    num_blocks: int,
    *,
    streams: bool,
    items_per_block: int,
    blocks_per_batch: int,
    repeat: Repeat | None = None,
    configs: Mapping[str, object] = MappingProxyType({}),
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

    def spec(name: str) -> StageSpec:
        learns, generates = name in _LEARNERS, name == "generation"
        return StageSpec(
            *(name, f"{_PACKAGE}.{_CLASSES[name]}", configs.get(name)),
            collective=learns,
            whole=learns and not streams,
            at_once=generates,
            waits=name in waiting,
            blocks_per_batch=blocks_per_batch if generates else 1,
        )

    return Workflow(
        name="reasoning",
        num_blocks=num_blocks,
        stages={name: spec(name) for name in names},
        edges=tuple(Edge(a, b, whole=not streams and b in _LEARNERS) for a, b in _ends(names)),
        weight_edges=tuple(WeightEdge("actor", name) for name in ("generation", "old_log_probs") if name in names),
        repeat=repeat,
        items_per_block=items_per_block,
        more_blocks="use more algorithm.prompts_per_iteration, a smaller generation.rows_per_block and rows_per_batch",
        of_workload=f"{__name__}.of_workload",
    )


def _ends(stages: Collection[str]) -> list[tuple[str, str]]:
    """Returns the data edges."""
    if "prompts" not in stages:
        rewarded = () if "critic" in stages else (("reward", "actor"),)
        return [(a, b) for a, b in (*_PUBLISHED, *rewarded) if a in stages and b in stages]
    sources = [name for name in stages if name not in ("prompts", "actor")]
    ends = [("prompts", "generation"), ("generation", "reward")]
    ends += [("generation", name) for name in ("old_log_probs", "reference", "critic") if name in sources]
    ends += [("reward", "critic")] if "critic" in sources else []
    return [*ends, *((name, "actor") for name in sources)]


def of_workload(work: Workload, stages: Collection[str]) -> Workflow:
    """Returns the graph that a profile was measured for.

    Where there is a critic, more than one optimizer step (whose ratio needs old log-probs) or a repeat, the learners
    wait for all answers; those of published systems do not.
    """
    repeats = work.max_rounds > 1
    waits = "prompts" in stages and (repeats or bool({"critic", "old_log_probs"} & set(stages)))
    return reasoning_graph(
        stages,
        work.num_items // work.items_per_block,
        streams=not waits,
        items_per_block=work.items_per_block,
        blocks_per_batch=work.blocks_per_batch,
        repeat=resample(lambda rounds: RepeatDecision(True), work.max_rounds) if repeats else None,  # nothing runs
    ).with_rounds(work.expected_rounds)


def resample(decide: Callable[[Sequence[Sequence[object]]], RepeatDecision], max_rounds: int) -> Repeat:
    """Returns the repeat of dynamic sampling: all that comes before the actor, until `decide` has enough groups."""
    return Repeat("resample", "actor", "reward", decide, max_rounds)
