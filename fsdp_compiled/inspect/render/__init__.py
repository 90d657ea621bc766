"""Draws ``records``. What formats share is decided once: words in ``figures``, the timeline in ``drawing``."""
