"""The commands; the packages below hold benchmarks, examples and the set-up of a machine."""
