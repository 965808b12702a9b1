"""Checkpoints: what a run needs to go on as if it had not been interrupted.

``files`` writes bytes so that they outlast a power cut, ``manifest`` says what a whole checkpoint is,
``store`` keeps those of one run, ``state`` and ``groups`` are what the controller puts into one, ``saver``
takes them beside training, and ``resume`` and ``rollback`` bring a run's folder back to one of them.
"""
