"""Programs that look at a user's script or model and advise: `doctor`, `profile`, `tune`, `fit`,
`bench`.

`diagnosis` is `doctor`, `profiling` is `profile`, `tuning` is `tune`, `fitting` is `fit`. `bench`
has the clock and the gate of every timing and the contestants of the command `bench`. `_scripts`
runs a user's script in a fresh process (`__main__`) and ends it after so many steps; `_child`
starts processes; `_views` has what several programs see of a run.
"""
