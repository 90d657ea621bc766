"""What compute and collectives cost on a given cluster, by arithmetic alone.

Nothing is measured at run time, so that every rank finds the same numbers; ``calibrate`` measures once, before.
"""

from .cluster import Cluster as Cluster
from .cluster import Curve as Curve
from .cluster import Lane as Lane
from .cluster import Link as Link
from .cluster import Measured as Measured
from .cluster import Times as Times
from .cluster import per_second as per_second
from .cluster_file import as_text as as_text
from .cluster_file import named as named
from .detection import VARIABLE as VARIABLE
from .detection import detect as detect
from .detection import group_places as group_places
from .detection import share as share
from .shipped import CLUSTERS as CLUSTERS
