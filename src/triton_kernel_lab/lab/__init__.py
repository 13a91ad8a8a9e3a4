"""Everything that touches a device to measure it."""
