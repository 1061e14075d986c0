"""A plan → the cluster.

applier.py      one pool: applies its objects, prunes, marks pods, writes the status
writer.py       sends requests; each write asks first whether this process still leads
ownership.py    which pool an object belongs to, and whether it is as it was last applied
refusal.py      an error of the API server → the field of the pool that causes it
field_path.py   paths through objects, as the API server and users write them
"""
