"""The reasoning workflow: a language model learns from answers that can be checked."""
