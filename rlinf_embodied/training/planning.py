"""The plan of a run: its choice, the prediction of its times, and its replacement when these drift.

choose    returns a forced plan, or the only feasible one without measuring; otherwise it ranks plans by the profile
          (cached, or measured now) and returns the best
observe   compares measured with predicted seconds of every stage after each iteration, and plans again after a
          lasting drift
report    writes the ranked plans, measured seconds, and the error of each prediction
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlinf_embodied.cache import require_writable
from rlinf_embodied.cluster.hardware import Cluster
from rlinf_embodied.config.checks import require
from rlinf_embodied.errors import PlanError
from rlinf_embodied.execution.profiler import ShowProgress, cached_path, fingerprint, measure, store_profile
from rlinf_embodied.planning.calls import Simulation
from rlinf_embodied.planning.check import check
from rlinf_embodied.planning.drift import DriftWatch, replan
from rlinf_embodied.planning.explain import LONG_COLUMNS, Ranked, Ranking, rank, rows
from rlinf_embodied.planning.notation import resolve, to_dict
from rlinf_embodied.planning.plan import Plan, collocated
from rlinf_embodied.planning.pricing import Pricer
from rlinf_embodied.planning.profile import Profile, as_measured, load_profile
from rlinf_embodied.planning.simulate import simulate
from rlinf_embodied.runtime.session import Session
from rlinf_embodied.telemetry.run_folder import RunFolder
from rlinf_embodied.telemetry.tables import described_table, text_table
from rlinf_embodied.training.job import Job


def _profile_path(job: Job, cluster: Cluster) -> tuple[Path, dict[str, str]]:
    """Returns the path of a job's cached profile, and its fingerprint."""
    config = job.config
    parts = job.planning_parts() | {"exact": config.run.exact.value, "session": config.cluster.session}
    key = fingerprint(cluster, parts)
    return cached_path(job.cache_dir, job.name, key), key


def measured_profile(
    job: Job, cluster: Cluster, policy_folder: str, session: Session, progress: ShowProgress
) -> tuple[Profile, Path]:
    """Measures the stages of a job with the policy of a folder and caches the profile; returns it and its path.

    Afterwards the session's workers have no stages.

    Raises:
        ConfigError: the cache cannot be written.
        NoRoomError: a stage does not fit into a device's memory.
    """
    path, key = _profile_path(job, cluster)
    require_writable(path)
    workflow, budget_s = job.workflow(policy_folder, profiled=True), job.config.plan.profile_budget_s
    profile = measure(workflow, session, cluster, job.name, key, progress, budget_s)
    store_profile(path, profile)
    return profile, path


@dataclass(slots=True)
class Period:
    """Iterations under one plan: predicted and measured seconds."""

    plan: Plan
    predicted: Simulation | None
    first_iteration: int
    iteration_s: list[float] = field(default_factory=list)
    stages_s: dict[str, list[float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the period as JSON-ready data: medians, and the relative error of each prediction."""
        samples = {"iteration": self.iteration_s, **self.stages_s}
        measured = {name: statistics.median(seconds) for name, seconds in samples.items() if seconds}
        predicted = {}
        if self.predicted is not None:
            predicted = {"iteration": self.predicted.iteration_s, **self.predicted.stages_s}
        return {
            "plan": self.plan.name,
            "first_iteration": self.first_iteration,
            "num_iterations": len(self.iteration_s),
            "predicted_s": predicted,
            "measured_s": measured,
            "error": {name: predicted[name] / measured[name] - 1 for name in predicted if measured.get(name)},
        }


class Planning:
    """The plan of one run, and its predictions."""

    def __init__(self, job: Job, cluster: Cluster, staleness: int | None = None) -> None:
        """Resolves a forced plan and reads plan.profile, so that errors are raised before anything starts.

        All plans of a resumed run keep its `staleness`; None: a new run.

        Raises:
            ConfigError: plan.profile cannot be read, or lacks a stage; the plan has another staleness than the run.
            PlanError: the plan does not fit the cluster.
        """
        self._job, self._cluster, self._staleness = job, cluster, staleness
        self._config = config = job.config
        self._workflow = job.workflow("")  # plans do not depend on where the policy comes from
        self._forced: Plan | None = None
        self._pricer: Pricer | None = None
        self._ranked: list[Ranked] = []
        self._watch: DriftWatch | None = None
        self.periods: list[Period] = []
        job.require_staleness(config.plan.max_staleness)
        if not config.plan.is_auto:
            self._forced = self._resolved(cluster)
            forced = self._forced.staleness
            job.require_staleness(forced)
            rule = f"its staleness is {forced}, but the resumed run has {staleness}, which affects its weights"
            action = f"use a plan with staleness {staleness}, or begin a new run in another run.dir"
            require(staleness in (None, forced), "plan", config.plan.name, rule, action)
        if config.plan.profile is not None:
            self._price(load_profile(Path(config.plan.profile).expanduser()))

    def _resolved(self, cluster: Cluster) -> Plan:
        """Returns the plan that the config names; a plan that sets no staleness gets plan.max_staleness."""
        config = self._config.plan
        plan = resolve(config.name, config.variants, cluster, self._workflow)
        if not plan.staleness and config.max_staleness:
            plan = replace(plan, staleness=config.max_staleness)
            check(plan, self._workflow)
        return plan

    def choose(
        self, policy_folder: str, session: Session, folder: RunFolder, progress: ShowProgress, iteration: int
    ) -> tuple[Plan, str]:
        """Returns the plan for the iterations from `iteration` on, and the reason; writes plan.json and profile.json.

        If the stages have to be measured, they are built with the policy of the folder, and discarded.

        Raises:
            ConfigError: plan.profile cannot be read, or lacks a stage.
            PlanError: no plan fits; the message names the missing resource.
        """
        forced, reason = self._forced, self._only_one()
        path = self._profile(policy_folder, session, progress, needed=forced is None and not reason)
        if path is not None:
            folder.write_text("profile.json", path.read_text(encoding="utf-8"))
            self._price(load_profile(path))
        if forced is not None:
            plan, why = forced, f"plan {forced.name}: forced" + ("" if path else ", not profiled")
        elif path is None:
            plan = replace(self._collocated(), staleness=self._staleness or 0)
            why = f"plan collocated: {reason}, so nothing is measured"
        else:
            staleness = self._staleness
            ranking = self._rank(staleness or 0, self._config.plan.max_staleness if staleness is None else staleness)
            plan, why = _named(ranking.best), self._explained(ranking)
        self._begin(plan, iteration)
        self.write(folder)
        return plan, why

    def _profile(self, policy_folder: str, session: Session, progress: ShowProgress, needed: bool) -> Path | None:
        """Returns the path of plan.profile or of the cached profile, which is measured first if needed."""
        if self._config.plan.profile is not None:
            return Path(self._config.plan.profile).expanduser()
        path, _ = _profile_path(self._job, self._cluster)
        if needed and not path.exists():
            measured_profile(self._job, self._cluster, policy_folder, session, progress)
        return path if needed or (self._forced is not None and path.exists()) else None

    def _explained(self, ranking: Ranking) -> str:
        """Returns the ranked plans as a table, with remarks."""
        assert self._pricer is not None
        title = f"plans of {self._workflow.name} on {self._cluster.name}, predicted:"
        unmeasured = [
            f"no plan uses the devices of kind {kind}, on which this profile measured nothing: profile this cluster"
            for kind in self._pricer.profile.unmeasured_kinds(self._cluster)
        ]
        table = described_table(rows(self._ranked), LONG_COLUMNS, title)
        return "\n".join([table, *unmeasured, *ranking.remarks])

    def _collocated(self) -> Plan:
        return collocated(self._workflow, self._cluster.num_computing, cores=self._cluster.cores_beside)

    def _rank(self, min_staleness: int = 0, max_staleness: int = 0) -> Ranking:
        assert self._pricer is not None
        limit_s = self._config.plan.search_s
        ranking = rank(self._pricer, min_staleness=min_staleness, max_staleness=max_staleness, search_s=limit_s)
        self._ranked = list(ranking.plans)
        return ranking

    def move(self, cluster: Cluster, iteration: int) -> Plan | None:
        """Plans for another cluster, such as the remaining nodes of this one; `iteration` is the next one.

        Returns the forced plan if it fits; otherwise the best plan by the profile, or without one the collocated plan.
        The staleness stays the same.  Returns None if no plan was chosen before.
        """
        self._cluster = cluster
        if self._forced is not None:
            try:
                self._forced = self._resolved(cluster)
            except PlanError:
                self._forced = None
        if not self.periods:
            return None
        staleness = self.plan.staleness
        plan = self._forced or replace(self._collocated(), staleness=staleness)
        if self._pricer is not None:
            self._price(self._pricer.profile)
            plan = self._forced or _named(self._rank(staleness, staleness).best)
        self._begin(plan, iteration)
        return plan

    def _only_one(self) -> str:
        """Returns the reason why only one plan is worth running, or ""."""
        reasons = {
            "there is one device": self._cluster.num_devices == 1,
            "one process runs one stage at a time under every plan": self._config.cluster.session == "serial",
            "there is one stage": len(self._workflow.stages) == 1,
            "there is one block": self._workflow.num_blocks == 1,
        }
        return next((reason for reason, holds in reasons.items() if holds), "")

    def _price(self, profile: Profile) -> None:
        each = max(spec.devices_per_worker for spec in self._workflow.stages.values())
        measured = profile.workload.devices_per_worker if profile.workload else each
        rule = f"its workers have {measured} devices, and those of this run {each}"
        require(measured == each, "plan.profile", profile.name, rule, "measure another one, or leave it out")
        standing = self._job.standing(self._cluster)
        self._pricer = Pricer(as_measured(self._workflow, profile), profile, self._cluster, standing=standing)

    def _begin(self, plan: Plan, iteration: int) -> None:
        """Begins a period with a plan and its current prediction."""
        predicted, self._watch = None, None
        if self._pricer is not None:
            predicted = simulate(plan, self._pricer)
            predicted = predicted if math.isfinite(predicted.iteration_s) else None
            # a plan with staleness is not replaced: the time of a switch would affect the weights of rollouts
            if predicted is not None and self._forced is None and self._config.plan.replan and not plan.staleness:
                self._watch = DriftWatch(predicted.stages_s, self._pricer.workflow.expected_rounds())
        self.periods.append(Period(plan, predicted, iteration))

    def observe(
        self,
        iteration: int,
        seconds: float,
        stages_s: Mapping[str, float],
        rounds: Mapping[str, int],
        *,
        remaining: int,
        switch_s: float,
    ) -> tuple[Plan | None, str]:
        """Records the times of an iteration; returns the plan to switch to, or None, and a note to print, or "".

        `stages_s` has the seconds of each stage's busiest worker.  The first iterations, whose work is different, are
        ignored.  The saving of another plan in the `remaining` iterations must exceed `switch_s`.
        """
        if iteration < self._workflow.typical_iteration:
            return None, ""
        period = self.periods[-1]
        period.iteration_s.append(seconds)
        for stage, value in stages_s.items():
            period.stages_s.setdefault(stage, []).append(value)
        if self._watch is None:
            return None, ""
        self._watch.observe(stages_s, rounds)
        drifted = self._watch.drifted()
        return self._replanned(drifted, iteration + 1, remaining, switch_s) if drifted and remaining else (None, "")

    def _replanned(
        self, drifted: Mapping[str, float], iteration: int, remaining: int, switch_s: float
    ) -> tuple[Plan | None, str]:
        assert self._pricer is not None
        assert self._watch is not None
        old = self.plan
        result = replan(self._pricer, old, self._watch.factors(), remaining, switch_s, self._config.plan.search_s)
        self._pricer = result.pricer
        drift = ", ".join(f"{stage} takes {factor:.2f} times its predicted time" for stage, factor in drifted.items())
        if result.plan is None:
            self._begin(old, iteration)
            return None, f"planned again ({drift}): {old.name} stays the best, now {result.stays_s:.2f} s predicted"
        self._begin(result.plan, iteration)
        return self.plan, (
            f"planned again ({drift}): from iteration {iteration + 1} on {self.plan.name}, "
            f"{self.predicted_s:.2f} s predicted instead of {result.stays_s:.2f} s under {old.name}"
        )

    @property
    def plan(self) -> Plan:
        return self.periods[-1].plan

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds per iteration of the current plan; None without a profile."""
        predicted = self.periods[-1].predicted
        return None if predicted is None else predicted.iteration_s

    def write(self, folder: RunFolder) -> None:
        """Writes plan.json: the current plan and the ranked plans."""
        content = {**to_dict(self.plan), "predicted_s_per_iteration": self.predicted_s}
        if self._ranked:
            content["ranked"] = rows(self._ranked)
        folder.write_json("plan.json", content)

    def report(self, folder: RunFolder) -> str:
        """Writes plan.json and plan_report.json; returns a table of predicted and measured seconds."""
        self.write(folder)
        periods = [period.to_dict() for period in self.periods if period.iteration_s]
        folder.write_json("plan_report.json", {"periods": periods, "ranked": rows(self._ranked)})
        lines = [line for period in periods for line in _report_rows(period)]
        return text_table(lines, "seconds per iteration, predicted and measured (medians):") if lines else ""


def _named(entry: Ranked) -> Plan:
    return replace(entry.plan, name=f"auto: {entry.label}")


def _report_rows(period: Mapping[str, Any]) -> Iterator[dict[str, str]]:
    for name, seconds in period["measured_s"].items():
        predicted, error = period["predicted_s"].get(name), period["error"].get(name)
        yield {
            "plan": period["plan"] if name == "iteration" else "",
            "stage": name,
            "predicted": "-" if predicted is None else f"{predicted:.3g}",
            "measured": f"{seconds:.3g}",
            "error": "-" if error is None else f"{error:+.0%}",
        }
