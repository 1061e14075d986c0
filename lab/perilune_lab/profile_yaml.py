"""What `perilune profile` measured, as YAML: fields of `spec.engine`, and comments.

    Profile, Transfer ─┬▶ left_out: which fields are not written, why, and what to do about it
                       └▶ as_yaml: the fields, the same sentences, and for the nodes' topology a command and
                          lines of a pool document

How fast KV comes is no property of an engine, so `spec.engine` has no field for it: each node says it of its
network cards (`perilune_api/topology.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from ipaddress import ip_address
from math import isfinite
from textwrap import wrap

import msgspec

from perilune_api import names
from perilune_api.topology import Level
from perilune_lab.profile_fit import FACTORS, SHORTEST, Profile, rounded
from perilune_lab.profile_transfer import Transfer

ENOUGH = f"--max-tokens {4 * SHORTEST} or more"
"""With which there are two lengths, each of which is sent whole and by halves: four kinds of prompts."""


def as_yaml(profile: Profile, transfer: Transfer | None = None) -> str:
    """Return the pool's cost model, fields of `spec.engine`, and in comments what the nodes' topology should
    say."""
    longest = max(row.tokens for row in profile.prompts)
    said = f"By perilune profile, with prompts of up to {longest} tokens; largest error"
    lines = [f"# {said} {profile.largest_error:.0%}"]
    for sentence in left_out(profile, transfer):
        lines += _comment(sentence)
    if profile.cost is None:
        lines.append(f"prefillScale: {decimal(rounded(profile.scale))}")
    else:
        cost = profile.cost
        if transfer and len(transfer.rows) > 1:
            cost = msgspec.structs.replace(cost, transfer_seconds=rounded(transfer.fit()[0]))
        known = {name: value for name, value in msgspec.to_builtins(cost).items() if value is not None}
        lines += ["prefillScale: 1", "costModel:"]
        lines += [f"  {name}: {decimal(value)}" for name, value in known.items()]
    if transfer and isfinite(transfer.fit()[1]):
        lines += _speed(transfer, profile.kv_bytes_per_token)
    return "\n".join(lines) + "\n"


def left_out(profile: Profile, transfer: Transfer | None = None) -> list[str]:
    """Return a sentence for each field that the measurement does not tell."""
    return [*_of_engine(profile), *(_of_transfer(transfer) if transfer else ())]


def _of_engine(profile: Profile) -> Iterator[str]:
    if profile.cost is None:
        yield (
            f"costModel is left out, because it takes prompts of {FACTORS} lengths: measure with {ENOUGH}."
            " prefillScale is one factor for all that this engine does."
        )
    elif (decoded := profile.decoded) is None:
        yield f"decodeSeconds and decodeScale are left out, so they are one H20's: {profile.undecoded}."
    elif decoded.hidden:
        beside, alone = decoded.beside_s * 1e3, decoded.alone_s * 1e3
        yield (
            f"decodeScale is left out, so it is 1, one H20's: a token of {decoded.streams} streams takes"
            f" {beside:.3g} ms, hardly more than the {alone:.3g} ms of one stream alone, which hide what is"
            f" read. It is at most {profile.decode_scale(decoded):.3g} here; a longer --max-tokens or more"
            " --streams tell it."
        )
    if profile.unmoved:
        yield f"transferSeconds and the speed of transfers are left out: {profile.unmoved}."


def _of_transfer(transfer: Transfer) -> Iterator[str]:
    if len(transfer.rows) == 1:
        yield (
            "transferSeconds is left out, because transfers of one length do not tell it from the speed:"
            f" measure with {ENOUGH}."
        )
    if not isfinite(transfer.fit()[1]):
        yield (
            "The speed of transfers is left out, because more tokens took no longer: measure with a longer"
            " --max-tokens or more --repeat."
        )


def _speed(transfer: Transfer, kv_bytes_per_token: int) -> list[str]:
    """Return comments with the speed of network cards by which the pool's cost model predicts the transfers:
    for Kubernetes, and for a pool document."""
    speeds = (transfer.nic_gbits(kv_bytes_per_token, level) for level in (Level.RACK, Level.FABRIC))
    near, far = (decimal(rounded(speed)) for speed in speeds)
    hosts = list(dict.fromkeys((transfer.taker, transfer.giver)))
    label = f"{names.NIC_GBITS}={near}"
    return [
        *_comment(
            f"KV of {kv_bytes_per_token} bytes per token came as fast as between network cards of {near}"
            f" Gbit/s; largest error {transfer.largest_error:.0%}. Gateways predict the same once both nodes"
            f" say so. If no labels tell that these share a rack or spine, say {far} instead."
        ),
        "# On Kubernetes:",
        *(f"#   kubectl label node --overwrite {_node(host)} {label}" for host in hosts),
        "# In a pool document, under spec.topology.nodes (endpoints[].node names the nodes):",
        *(f"#   NODE-OF-{host}: {{nicGbits: {near}}}" for host in hosts),
    ]


def _comment(sentence: str) -> list[str]:
    lines = wrap(sentence, 100, break_long_words=False, break_on_hyphens=False)
    return [f"# {line}" for line in lines]


def _node(host: str) -> str:
    """Return a shell's words for the node of the pod with this address; for a host's name, a word that the
    user replaces."""
    try:
        ip_address(host)
    except ValueError:
        return f"NODE-OF-{host}"
    path = "-o jsonpath='{.items[0].spec.nodeName}'"
    return f"$(kubectl get pod -A --field-selector=status.podIP={host} {path})"


def decimal(value: float) -> str:
    """Write a number as YAML and labels understand it: without an exponent."""
    return f"{Decimal(str(value)).normalize():f}"
