"""Policies behind the `Policy` protocol: each module brings its own model library and is reached by its dotted path."""
