"""The driver on the devices: what runs inside the compiled program, and what starts it."""
