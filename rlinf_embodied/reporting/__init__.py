"""Pages of runs: what a run folder holds, and how it is drawn."""
