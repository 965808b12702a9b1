"""Updates of the policy: one rank (DeepSpeed), all ranks together, and the plan between them."""
