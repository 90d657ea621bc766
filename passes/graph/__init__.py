"""Reads and writes FX graphs: our operators as nodes, where tensors live, requests and lowered buckets.

It must not decide anything.
"""
