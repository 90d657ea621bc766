"""The eager driver: when an uncompiled unit is all-gathered, resharded and reduced, and in which order.

It calls the collective stack on groups of parameters. It must not know FX graphs.
"""
