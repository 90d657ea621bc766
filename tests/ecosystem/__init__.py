"""Libraries that train: run by their own command, `python -m pytest tests/ecosystem`, with the extra `ecosystem`.

Each library trains a tiny model on 2 gloo ranks, in eager hooks and as one full graph, and must give the losses of
one process or of FSDP2. What is not installed is skipped.
"""
