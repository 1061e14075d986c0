"""Contracts between Perilune's processes: strings, the pool document, topology, Envoy's messages.

Imports nothing of ours; the gateway, the operator and the lab all import it.
"""
