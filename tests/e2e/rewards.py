"""A reward that an untrained model gets sometimes, so that there is a gradient from the first step."""


def digits(completion: str) -> float:
    """Share of the characters that are digits."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)


def digits_but_no_threes(completion: str, question: str) -> float:
    """As ``digits``; raises for questions that start with a 3."""
    if question.startswith("3"):
        raise ValueError("no reward for threes")
    return digits(completion)
