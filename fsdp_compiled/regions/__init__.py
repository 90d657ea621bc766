"""Blocks that are compiled once and called wherever an equal block is: ``choose`` finds them, ``block`` makes one."""
