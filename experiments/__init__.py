"""Entry points: what users run lies here, and below it benchmarks, checks, examples and the set-up of a machine."""
