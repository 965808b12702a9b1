"""The seam to users' environments: a rollout is ``async rollout(task, client) -> RolloutResult``."""
