"""What compute and collectives cost on a given cluster, by arithmetic alone.

Nothing is measured at run time, so that every rank finds the same numbers.
"""

from .cluster import CLUSTERS, EFFICIENCY, Cluster, Lane, Link, Times, description, detect, group_places

__all__ = ["CLUSTERS", "EFFICIENCY", "Cluster", "Lane", "Link", "Times", "description", "detect", "group_places"]
