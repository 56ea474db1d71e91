"""The macro flow: stages, edges and loops of a workflow."""
