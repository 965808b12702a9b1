"""Prompts: where rows come from, how they are written, and the endless stream of tasks."""

from asyncrl.data.prompts import PromptReport, Prompts, load_prompts
from asyncrl.data.stream import PromptStream

__all__ = ["PromptReport", "PromptStream", "Prompts", "load_prompts"]
