"""A plan → the cluster.

applier.py      one pool: applies its objects, prunes, marks pods, writes the status
writer.py       sends requests; each write asks first whether this process still leads
ownership.py    whose an object is, and whether it is as it was last applied
refusal.py      what the API server says is wrong → the field of the pool that it comes from
field_path.py   paths through objects, as the API server and users write them
"""
