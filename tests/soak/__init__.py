"""A long training run that is killed and resumed: see `__main__.py`, or ``make soak``."""
