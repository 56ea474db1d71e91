"""The section `algorithm`: settings that every algorithm has.  Each algorithm's own dataclass is in algorithms/."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rlinf_embodied.config.checks import require, require_numbers
from rlinf_embodied.config.env import EnvConfig
from rlinf_embodied.config.language import Precision
from rlinf_embodied.config.learning import Critic
from rlinf_embodied.config.run import Exactness

if TYPE_CHECKING:
    from rlinf_embodied.config.commands import TrainConfig


@dataclass(frozen=True, slots=True)
class Resampling:
    """Rollouts are repeated until enough groups of episodes differ in their outcome."""

    num_groups: int  # per rollout
    min_groups: int  # useful groups that end the repetition
    drop: bool  # whether groups without a difference are dropped
    max_rounds: int


class Source(StrEnum):
    """The data that an algorithm learns from."""

    rollouts = "rollouts"  # whole rollouts of the trained weights, used once
    transitions = "transitions"  # single env steps from the replay buffer
    demonstrations = "demonstrations"  # episodes of files or of the scripted expert, used repeatedly


class Level(StrEnum):
    """The unit of an importance ratio: log-probs are summed within it first."""

    token = "token"
    action = "action"
    chunk = "chunk"


class RatioLevel(StrEnum):
    """What one ratio pi / pi' of probabilities stands for."""

    token = "token"  # one choice (in the embodied workflow a Level)
    sequence = "sequence"  # a chunk or completion: the product over its choices
    geometric = "geometric"  # a chunk or completion: the geometric mean over its choices


LOSSES = {  # names of policy losses on the command line and in presets
    "clipped": "rlinf_embodied.algorithms.policy_losses.Clipped",
    "cispo": "rlinf_embodied.algorithms.policy_losses.CISPO",
    "dppo": "rlinf_embodied.algorithms.policy_losses.DPPO",
    "gspo": "rlinf_embodied.algorithms.policy_losses.GSPO",
    "sequence": "rlinf_embodied.algorithms.policy_losses.SequenceClipped",
}


@dataclass(kw_only=True, slots=True)
class PolicyLoss:
    """A policy loss as a function of importance ratios; a subclass adds its options as fields, and the formula.

    `algorithm.loss._target_` names the subclass; the names in LOSSES stand for those of algorithms/policy_losses.py.
    """

    needs_reference: ClassVar[bool] = False  # whether it uses log-probs under the run's starting policy
    level: ClassVar[RatioLevel] = RatioLevel.token  # of its ratios
    regularizes: ClassVar[bool] = True  # whether an entry without an advantage has a gradient; false saves passes
    takes_dual_clip: ClassVar[bool] = False

    _target_: str = ""

    def __call__(self, entries: Any) -> Any:
        """Returns the loss of each entry, [*axes]; `entries` are PolicyEntries of algorithms/policy_losses.py."""
        raise NotImplementedError


class Reduction(StrEnum):
    """How gradients are summed over workers."""

    auto = "auto"  # exact on a CPU, fast on an accelerator
    exact = "exact"  # along one fixed binary tree over blocks: the same bits for every plan and worker count
    fast = "fast"  # all-reduce


class Sharding(StrEnum):
    """How the actor's weights and optimizer state are distributed during training."""

    none = "none"  # a whole copy in each of its workers
    fsdp2 = "fsdp2"  # sharded over its workers, see docs/reasoning.md and docs/pi.md


def require_exact(exact: Exactness, path: str, reduction: Reduction, compile: bool = False) -> None:
    """Checks that the settings of a learner's section `path` are compatible with run.exact."""
    holds, rule = reduction is not Reduction.fast or not exact.holds, "run.exact=true needs sums in a fixed order"
    require(holds, f"{path}.reduction", reduction.value, rule, f"set run.exact=false or {path}.reduction=auto")
    holds = not compile or exact is not Exactness.portable
    rule = "run.exact=portable promises the same bits on every processor, and compiled kernels are specific to one"
    require(holds, f"{path}.compile", compile, rule, f"set run.exact=exact (every plan, here) or {path}.compile=false")


def require_dual_clip(dual_clip: float | None, loss: PolicyLoss) -> None:
    """Checks that a dual clip is above 1, and that the loss uses it."""
    rule, action = f"{type(loss).__name__} has no such bound", "leave it out, or use algorithm.loss=clipped"
    require(dual_clip is None or loss.takes_dual_clip, "algorithm.dual_clip", dual_clip, rule, action)
    require(dual_clip is None or dual_clip > 1, "algorithm.dual_clip", dual_clip, "it lies above 1", "use 3.0")


def require_correction(staleness: int, tis_cap: float | None) -> None:
    """Checks that an off-policy correction is set if rollouts use earlier weights."""
    rule = f"with a staleness of {staleness} (of the plan, or plan.max_staleness) rollouts use older weights"
    action = "correct for them with algorithm.tis_cap=2.0, or use plan.max_staleness=0"
    require(staleness == 0 or tis_cap is not None, "algorithm.tis_cap", tis_cap, rule, action)


@dataclass(kw_only=True, slots=True)
class AlgorithmConfig:
    """Settings that every algorithm has; a subclass adds its own settings and class variables."""

    name: ClassVar[str]  # displayed
    learns_from: ClassVar[Source]
    acts: ClassVar[bool] = True  # whether the policy acts in the env; otherwise it learns from `data` alone
    columns: ClassVar[tuple[str, ...]] = ()  # columns of transitions that it needs, see algorithms/transitions.py
    policy_method: ClassVar[str] = "evaluate"  # method that the policy must have
    has_critic: ClassVar[bool] = False  # whether it estimates values

    _target_: str = ""  # dotted path of the algorithm's dataclass; presets in configs/algorithm set it
    lr: float = 3e-4
    beta1: float = 0.9  # of Adam
    beta2: float = 0.999  # of Adam
    adam_eps: float = 1e-8
    weight_decay: float = 0.0  # decoupled, as in AdamW
    reduction: Reduction = Reduction.auto
    precision: Precision = Precision.float32  # of rollouts and passes, except those of a critic on privileged state
    compile: bool = False  # compile the update's passes with torch.compile (docs/gymnasium.md)

    def __post_init__(self) -> None:
        require_numbers(self, "algorithm", "lr", "adam_eps", low=0, above=True)
        require_numbers(self, "algorithm", "weight_decay")
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            require(0 <= value < 1, f"algorithm.{name}", value, "it lies in [0, 1)", "use 0.9")

    def make(self, training: Any) -> Any:
        """Returns the learner, an Algorithm, in a worker; both types are those of algorithms/algorithm.py."""
        raise NotImplementedError

    def check(self, config: TrainConfig) -> None:
        """Checks the algorithm against the other sections of a training."""

    def bootstraps(self, critic: Critic) -> bool:
        """Returns whether the algorithm counts the value after a time-out."""
        return False

    @property
    def needs_success(self) -> bool:
        """Whether it compares episodes by success; tasks without success are refused."""
        return False

    @property
    def uses_demonstrations(self) -> bool:
        """Whether it learns from demonstrations, alone or in addition to rollouts."""
        return self.learns_from is Source.demonstrations

    @property
    def same_start(self) -> int:
        """Number of env rows that start from one initial state."""
        return 1

    def resampling(self, env: EnvConfig) -> Resampling | None:
        """Returns how rollouts are repeated within an iteration; None: an iteration has one rollout."""
        return None

    def without_early_stop(self) -> Self:
        """Returns these settings for a profile, in which no update may end early: updates of a run's beginning do."""
        return self

    def typical_iteration(self, env: EnvConfig) -> int:
        """Returns the first iteration whose work is like that of later ones."""
        return 0
