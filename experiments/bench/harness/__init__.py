"""What all benchmarks share: one command line, one alternation of arms, one spread, one table, one file of results.

options: a dataclass   ->  Benchmark.main  ->  Run: options, overrides of the training config, machine
measure(run) -> Report <-  alternate(arms)  <-  Child (a command with a log)
Report                 ->  printed, <out>.json, <out>.png
"""

from experiments.bench.harness.command import Benchmark, Run, chosen, names_of
from experiments.bench.harness.processes import REPOSITORY, Child, trained_run
from experiments.bench.harness.report import Report, Table
from experiments.bench.harness.statistics import Goal, Spread, Timing, alternate, ratios
