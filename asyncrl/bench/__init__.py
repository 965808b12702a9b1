"""One config in several modes, side by side, with where the time went: real runs and simulated ones alike."""
