"""Reads and writes FX graphs: our operators as nodes, compute by position, plans."""
