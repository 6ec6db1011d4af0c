"""The machine: which devices a run uses, and how several processes find and leave each other."""
