"""Users' reward functions: bound by argument name, run in worker processes that can be killed."""
