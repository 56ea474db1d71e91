"""Protocols of plug-ins and the data that they exchange with the core: envs, policies, language models."""
