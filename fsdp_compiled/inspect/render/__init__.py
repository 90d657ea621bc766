"""Draws the records of ``inspect``: ``text``, ``html``, ``png`` and ``data``, which is JSON and a trace.

What formats share is decided once: the words in ``figures``, the timeline in ``timeline`` and its shapes and colours
in ``drawing``, which ``html`` and ``png`` only paint.
"""
