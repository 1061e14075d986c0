"""Engines, gateway and Envoy as child processes on this machine."""
