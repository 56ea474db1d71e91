"""Simulators behind the `VectorEnv` protocol of `rlinf_embodied.interfaces.envs`."""
