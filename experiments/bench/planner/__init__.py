"""What the planner says of published workloads, and what EMULATED clusters make of it."""
