"""One half of a run alone: generators without a learner, or a learner without generators."""
