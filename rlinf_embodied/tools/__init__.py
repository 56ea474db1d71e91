"""Tools around the core, which never imports them; they run the same code as a training.

chaos.py           schedules faults while a training runs; disturbances.py injects them
emulation.py       runs plans, and a launch's probes, on real workers whose stages sleep (emulated_stage.py)
plans.py           profiles, described clusters and plans by name
memory.py          memory of large policies, counted on the meta device
"""
