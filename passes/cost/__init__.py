"""What compute and collectives cost on a given cluster, by arithmetic alone.

Nothing is measured at run time, so that every rank finds the same numbers. It must not know buckets or order.
"""

from .cluster import EFFICIENCY, Cluster, Lane, Link
from .clusters import CLUSTERS, description, detect, group_places

__all__ = ["CLUSTERS", "EFFICIENCY", "Cluster", "Lane", "Link", "description", "detect", "group_places"]
