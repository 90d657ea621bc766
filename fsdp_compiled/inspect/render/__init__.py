"""Draws the records of ``inspect``: ``text``, ``html``, ``png``, ``trace`` and, as data, ``plain``.

What formats share is decided once: the words in ``facts``, text tables in ``table``, the timeline in ``timeline``
and its shapes in ``drawing``, which ``svg`` and ``png`` only paint. It must not know how records are found.
"""
