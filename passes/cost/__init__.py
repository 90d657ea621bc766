"""What compute and collectives cost on a given cluster, by arithmetic alone.

Nothing is measured at run time, so that every rank finds the same numbers; ``calibrate`` measures once, before.
"""

from .cluster import Cluster, Curve, Lane, Link, Measured, Times
from .cluster_file import as_text, named, parse
from .detection import detect, group_places, network_bytes_per_s, share
from .shipped import CLUSTERS

__all__ = [
    "CLUSTERS",
    "Cluster",
    "Curve",
    "Lane",
    "Link",
    "Measured",
    "Times",
    "as_text",
    "detect",
    "group_places",
    "named",
    "network_bytes_per_s",
    "parse",
    "share",
]
