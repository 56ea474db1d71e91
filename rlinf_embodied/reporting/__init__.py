"""Pages of runs: what a run folder holds, how it is drawn, and finished runs side by side."""
