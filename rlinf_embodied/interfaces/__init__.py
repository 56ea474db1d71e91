"""What plug-ins meet, the data that they give and take and their protocols: envs, policies, language models."""
