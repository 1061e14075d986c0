"""The facts about a pool, gathered from the cluster before anything is decided.

facts.py            values that a plan reads
readers.py          Kubernetes objects → facts
cluster.py          watches, and `observe`: everything about one pool
copies.py           the watched objects, by the pool that they belong to
discovery.py        which optional APIs the cluster has, and whether it serves pools
routes.py           pools whose routes compete for the same requests
topology.py         node labels → racks and spines
gateway_pages.py    what gateways report on their metrics pages
timestamps.py       times as Kubernetes writes them
"""
