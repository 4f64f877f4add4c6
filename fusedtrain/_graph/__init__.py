"""A model as convert and fold see it: graphs of forwards, effects of calls, replaced forwards.

`tracer`, `intercept`, `way` and `flow` have the graphs of forwards, `effects` what a call reads and
writes, `names` and `functions` what Python code may find elsewhere. `forward` gives a module
another forward or class, `guards` and `hooks` know when that forward may run. `state` finds what
code has written to, and takes it back. `report` tells what was done; `example`, `kept` and
`difference` run a model, count what it keeps for backward and compare what it computes; `compiled`
and `fx` are torch.compile and torch.fx."""
