"""What people look at: learning curves and tables of runs, episodes as pictures.

Here belongs what turns the numbers of runs and episodes into a picture or a table. May import `runs`, `device`, `envs`
and `cli`. Runs do not import it: what one draws at its end is handed to it.
"""
