"""Tools around the core, which never imports them: what they measure or break is the same code that trains.

chaos.py           faults by a schedule while a training runs; disturbances.py does the harm
emulation.py       runs plans, and a launch's probes, on real workers whose stages sleep (emulated_stage.py)
plans.py           profiles, described clusters and plans by name
memory.py          what a large policy holds, and where it fits; counted on the meta device
"""
