"""The blocks of the config, by what they are about. ``asyncrl.config`` has all of them, and the whole."""
