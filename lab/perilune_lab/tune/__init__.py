"""`perilune tune`: parameters of a policy, found on a pool's own decision log in the simulator.

decision logs ─▶ recorded: sessions, pool ─▶ two halves ─┬─▶ search: the best parameters of one half
                                                         └─▶ gain: what they bring in the other
"""
