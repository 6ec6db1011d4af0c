"""What people look at: learning curves and tables of runs, episodes as pictures.

Here belongs what turns the numbers of runs and episodes into a picture or a table. May import `runs`, `device`, `envs`
and `cli`. Nothing that trains imports it: what a run draws at its end is handed to the run.
"""
