"""The error tree: one class per cause, so that callers can tell user input from a broken machine."""

from __future__ import annotations


class RlinfError(Exception):
    """Any error that this project raises on purpose; the message names the value, the rule and the next action."""


class ConfigError(RlinfError):
    """The configuration is wrong; nothing expensive has started yet."""


class PlanError(RlinfError):
    """A plan does not fit the workflow or the cluster."""


class CheckpointError(RlinfError):
    """A checkpoint is missing, damaged, incomplete, or belongs to something else."""


class DataError(RlinfError):
    """A dataset is missing or empty, one of its records cannot be used, or there is nothing to learn from it."""


class SimulatorError(RlinfError):
    """A simulator cannot be built, or refused its input."""


class ObjectiveError(RlinfError):
    """Training would compute something else than was asked for, for example a ratio that is not 1 at the start."""


class WorkerError(RlinfError):
    """A worker died or raised; the message names the worker, its stage and the call."""


class PlugInError(WorkerError):
    """Code of the user's (an env, a policy, a reward, a source of problems) raised; the message shows where in it."""


class HangError(RlinfError):
    """A wait ran into its limit; the message says who waits for whom."""
