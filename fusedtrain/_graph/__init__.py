"""A model as convert and fold see it: graphs of forwards, effects of calls, replaced forwards.

`tracer`, `intercept` and `flow` have the graphs of forwards, `effects` what a call reads and
writes, `names` and `functions` what Python code may find elsewhere. `forward`, `guards` and
`hooks` are a rewritten forward: when it runs, and when the class's own does. `records` and `report`
keep and tell what was done; `example`, `kept` and `difference` run a model, count what it keeps for
backward and compare what it computes; `compiled` and `fx` are torch.compile and torch.fx."""
