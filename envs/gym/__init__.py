"""Any Gymnasium env as rows: env=gymnasium env.id=<id> (docs/gymnasium.md)."""
