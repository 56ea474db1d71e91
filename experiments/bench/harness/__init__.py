"""What all benchmarks share: one command line, one alternation of arms, one spread, one table, one file of results.

options: a dataclass   ->  Benchmark.main  ->  Run: options, overrides of the training config, machine
measure(run)           <-  alternate(arms)  <-  Child (a command with a log)
                       ->  prints a table, Run.write: <out>.json; curves: <out>.png
"""

from experiments.bench.harness.command import Benchmark, Run, chosen, names_of
from experiments.bench.harness.processes import REPOSITORY, Child, trained_run
from experiments.bench.harness.report import table
from experiments.bench.harness.statistics import Goal, Spread, Timing, alternate, ratios
