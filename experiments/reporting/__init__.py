"""The pages that experiments/report.py writes: what a run folder holds, and how it is drawn."""
