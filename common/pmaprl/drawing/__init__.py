"""Learning curves and tables, and episodes as pictures."""
