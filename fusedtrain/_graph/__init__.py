"""What convert and fold see of a model: graphs of forwards, effects of calls, replaced forwards."""
