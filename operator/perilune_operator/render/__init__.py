"""Spec → Kubernetes objects, one module per part; `objects.py` holds what all of them share."""
