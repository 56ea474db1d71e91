"""What the driver itself costs."""
