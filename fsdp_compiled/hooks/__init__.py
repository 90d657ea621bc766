"""The eager driver: when an uncompiled unit is all-gathered, resharded and reduced, and in which order."""
