"""Policies for people: `perilune policies` lists them, `perilune policy new` begins a package with one."""
