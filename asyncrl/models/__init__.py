"""Small models made on first use, so that a first run needs no download."""

from asyncrl.models.create import ensure_model, model_folder
from asyncrl.models.progress import ProgressCallback, WarmStartProgress, show_progress

__all__ = ["ProgressCallback", "WarmStartProgress", "ensure_model", "model_folder", "show_progress"]
