"""Blocks that are compiled once and called wherever an equal block is.

``choose`` finds them, ``block`` makes a module one, ``guards`` and ``schemas`` are what torch lacks for them.
"""
