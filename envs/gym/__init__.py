"""Any Gymnasium env as rows of this project: env=gymnasium env.id=<id> (docs/gymnasium.md)."""
