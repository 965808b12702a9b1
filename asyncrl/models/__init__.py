"""Small models made on first use, so that a first run needs no download."""

from asyncrl.models.create import ensure_model, model_folder
from asyncrl.models.progress import show_progress
from asyncrl.models.warm_start import ProgressCallback, WarmStartProgress

__all__ = ["ProgressCallback", "WarmStartProgress", "ensure_model", "model_folder", "show_progress"]
