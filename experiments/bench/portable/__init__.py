"""What portable bits cost."""
