"""`perilune doctor`: what each engine is, what it lacks for exact routing, and the flag that cures it.

cli.py         the command; which engines are meant
    pods.py        a pool's engines in Kubernetes, reached through the API server
    examine.py     asks one engine everything, within limits
    tokens.py      compares the tokens that engines and gateway make of the same prompts
    report.py      rows and findings as a table or as JSON

What the facts of an engine mean, says the gateway (`perilune_gateway.observe.findings`).
"""
