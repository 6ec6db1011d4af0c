"""One run: its intervals, rows, checkpoints, evaluations, and the lines that it prints."""
