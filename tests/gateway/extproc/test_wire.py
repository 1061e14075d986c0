"""Envoy's protobuf ↔ values."""

import pytest
from google.protobuf.struct_pb2 import Struct
from hypothesis import given
from hypothesis import strategies as st

from perilune_api import extproc_pb2 as pb
from perilune_api import names
from perilune_gateway.extproc import wire
from perilune_gateway.extproc.messages import (
    Body,
    BodyMode,
    Continue,
    Echo,
    Immediate,
    Kind,
    Override,
    Pick,
    RequestHeaders,
    ResponseHeaders,
    Trailers,
)
from perilune_gateway.model import ProtocolError, RefuseReason, RequestHead

A, B = "10.0.0.1:8000", "10.0.0.2:8000"


def struct(**fields) -> Struct:
    made = Struct()
    made.update({name.replace("_", "-"): value for name, value in fields.items()})
    return made


def headers(pairs: dict[str, str] | list[tuple[str, str]], end_of_stream: bool = False) -> pb.HttpHeaders:
    pairs = list(pairs.items()) if isinstance(pairs, dict) else pairs
    values = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=values), end_of_stream=end_of_stream)


def decoded(**fields):
    return wire.decode(pb.ProcessingRequest(**fields).SerializeToString())


def encoded(outbound) -> pb.ProcessingResponse:
    return pb.ProcessingResponse.FromString(wire.encode(outbound))


def set_by(mutation: pb.HeaderMutation) -> dict[str, str]:
    assert all(o.append_action == o.OVERWRITE_IF_EXISTS_OR_ADD for o in mutation.set_headers)
    assert not any(o.header.value for o in mutation.set_headers)
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


# Inbound.

POST = {":method": "POST", ":path": "/v1/x", "content-length": "12"}


def test_request_headers_become_a_head():
    inbound = decoded(request_headers=headers(POST), protocol_config=pb.ProtocolConfiguration())
    assert inbound == RequestHeaders(
        RequestHead(method="POST", path="/v1/x", headers=POST, subset=None, has_body=True),
        BodyMode.NONE,
        BodyMode.NONE,
    )


def test_end_of_stream_on_headers_means_no_body():
    assert decoded(request_headers=headers(POST, end_of_stream=True)).head.has_body is False


def test_header_names_become_lower_case_and_equal_ones_are_joined():
    pairs = [("Accept", "a"), ("accept", "b"), ("cookie", "c=1"), ("cookie", "d=2")]
    inbound = decoded(request_headers=headers(pairs))
    assert inbound.head.headers == {"accept": "a, b", "cookie": "c=1; d=2"}


def test_header_that_is_no_utf8_does_not_stop_anything():
    value = pb.HeaderValue(key="x", raw_value=b"\xff")
    inbound = decoded(request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=[value])))
    assert inbound.head.headers == {"x": "\ufffd"}


def test_header_value_of_an_old_envoy_is_read():
    value = pb.HeaderValue(key="x", value="text")
    inbound = decoded(request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=[value])))
    assert inbound.head.headers == {"x": "text"}


@pytest.mark.parametrize("mode", BodyMode)
def test_body_modes_are_those_of_the_protocol_config(mode):
    number = pb.ProcessingMode.BodySendMode.Value(mode.name)
    told = pb.ProtocolConfiguration(request_body_mode=number, response_body_mode=number)
    inbound = decoded(request_headers=headers(POST), protocol_config=told)
    assert (inbound.request_mode, inbound.response_mode) == (mode, mode)


def test_without_protocol_config_the_request_counts_as_buffered():
    inbound = decoded(request_headers=headers(POST))
    assert (inbound.request_mode, inbound.response_mode) == (BodyMode.BUFFERED, BodyMode.NONE)


def test_response_headers_that_open_the_stream_tell_its_mode():
    told = pb.ProtocolConfiguration(response_body_mode=pb.ProcessingMode.FULL_DUPLEX_STREAMED)
    inbound = decoded(response_headers=headers({":status": "401"}), protocol_config=told)
    assert inbound == ResponseHeaders(status=401, response_mode=BodyMode.FULL_DUPLEX_STREAMED)


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        pytest.param([A, B], {A, B}, id="a list"),
        pytest.param(f"{A}, {B}", {A, B}, id="a comma-separated string"),
        pytest.param(A, {A}, id="a string with one"),
        pytest.param([], set(), id="an empty list: none is allowed"),
        pytest.param("", set(), id="an empty string: none is allowed"),
        pytest.param([A, "", " "], {A}, id="blanks are nobody"),
    ],
)
def test_the_subset_hint_is_read_from_the_metadata(hint, expected):
    fields = struct()
    fields.update({"x-gateway-destination-endpoint-subset": hint})
    metadata = pb.Metadata(filter_metadata={"envoy.lb.subset_hint": fields})
    inbound = decoded(request_headers=headers(POST), metadata_context=metadata)
    assert inbound.head.subset == expected


@pytest.mark.parametrize(
    "metadata",
    [{}, {"envoy.lb": struct(a="b")}, {"envoy.lb.subset_hint": struct(other="x")}],
    ids=["no metadata", "other namespace", "other key"],
)
def test_no_subset_hint_means_all(metadata):
    inbound = decoded(request_headers=headers(POST), metadata_context=pb.Metadata(filter_metadata=metadata))
    assert inbound.head.subset is None


SERVED = {"envoy.lb": struct(x_gateway_destination_endpoint_served=A)}
UPSTREAM = Struct()
UPSTREAM.update({"upstream.address": B})
ATTRIBUTES = {"envoy.filters.http.ext_proc": UPSTREAM}


@pytest.mark.parametrize(
    ("metadata", "attributes", "served"),
    [
        pytest.param({}, {}, "", id="nobody says"),
        pytest.param(SERVED, {}, A, id="metadata"),
        pytest.param({}, ATTRIBUTES, B, id="attribute"),
        pytest.param(SERVED, ATTRIBUTES, A, id="metadata before attribute"),
        pytest.param({"envoy.lb": struct(a="b")}, ATTRIBUTES, B, id="other metadata, attribute"),
    ],
)
def test_response_headers_tell_who_served(metadata, attributes, served):
    inbound = decoded(
        response_headers=headers({":status": "200", "content-type": "text/event-stream"}),
        metadata_context=pb.Metadata(filter_metadata=metadata),
        attributes=attributes,
    )
    assert inbound == ResponseHeaders(
        status=200, content_type="text/event-stream", served=served, end_of_stream=False
    )


def test_response_headers_that_end_the_response():
    assert decoded(response_headers=headers({":status": "204"}, end_of_stream=True)).end_of_stream is True


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"request_body": pb.HttpBody(body=b"x")}, Body(Kind.REQUEST_BODY, b"x", False)),
        ({"request_body": pb.HttpBody(end_of_stream=True)}, Body(Kind.REQUEST_BODY, b"", True)),
        ({"response_body": pb.HttpBody(body=b"x")}, Body(Kind.RESPONSE_BODY, b"x", False)),
        ({"request_trailers": pb.HttpTrailers()}, Trailers(Kind.REQUEST_TRAILERS)),
        ({"response_trailers": pb.HttpTrailers()}, Trailers(Kind.RESPONSE_TRAILERS)),
    ],
    ids=["request body", "its end", "response body", "request trailers", "response trailers"],
)
def test_bodies_and_trailers_are_read(fields, expected):
    assert decoded(**fields) == expected


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\xff\xff", id="no protobuf"),
        pytest.param(b"", id="empty"),
        pytest.param(pb.ProcessingRequest(response_headers=headers({})).SerializeToString(), id="no status"),
        pytest.param(
            pb.ProcessingRequest(response_headers=headers({":status": "abc"})).SerializeToString(),
            id="status is no number",
        ),
        pytest.param(
            pb.ProcessingRequest(
                request_headers=headers(POST), protocol_config=pb.ProtocolConfiguration(request_body_mode=77)
            ).SerializeToString(),
            id="unknown body mode",
        ),
    ],
)
def test_nonsense_is_a_protocol_error(raw):
    with pytest.raises(ProtocolError):
        wire.decode(raw)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_a_protocol_error(raw):
    try:
        wire.decode(raw)
    except ProtocolError:
        pass


# Outbound.


@pytest.mark.parametrize("kind", Kind)
def test_continue_answers_the_message_of_its_kind(kind):
    message = encoded(Continue(kind))
    assert message.WhichOneof("response") == kind
    assert not message.HasField("mode_override")
    assert not message.HasField("dynamic_metadata")


def test_continue_sets_headers():
    common = encoded(Continue(Kind.RESPONSE_HEADERS, (("x-a", "1"), ("x-b", "2")))).response_headers.response
    assert set_by(common.header_mutation) == {"x-a": "1", "x-b": "2"}
    assert common.status == common.CONTINUE


@pytest.mark.parametrize("kind", [Kind.REQUEST_HEADERS, Kind.REQUEST_BODY])
def test_pick_is_header_and_metadata_alike(kind):
    message = encoded(Pick(to=kind, destinations=(A, B)))
    assert message.WhichOneof("response") == kind
    common = getattr(message, kind).response
    assert set_by(common.header_mutation) == {"x-gateway-destination-endpoint": f"{A},{B}"}
    assert common.clear_route_cache is True
    assert dict(message.dynamic_metadata) == {"envoy.lb": struct(x_gateway_destination_endpoint=f"{A},{B}")}


def test_pick_names_the_rank():
    mutation = encoded(
        Pick(to=Kind.REQUEST_BODY, destinations=(A,), rank=0)
    ).request_body.response.header_mutation
    assert {h.header.key: h.header.raw_value for h in mutation.set_headers}["x-data-parallel-rank"] == b"0"
    mutation = encoded(Pick(to=Kind.REQUEST_BODY, destinations=(A,))).request_body.response.header_mutation
    assert "x-data-parallel-rank" not in {h.header.key for h in mutation.set_headers}


def test_pick_may_replace_the_body():
    replaced = encoded(Pick(to=Kind.REQUEST_BODY, destinations=(A,), body=b"new")).request_body.response
    assert replaced.body_mutation.body == b"new"
    assert set_by(replaced.header_mutation)["content-length"] == "3"
    assert not encoded(Pick(to=Kind.REQUEST_BODY, destinations=(A,))).request_body.response.HasField(
        "body_mutation"
    )


@pytest.mark.parametrize("outbound", [Pick, Continue])
@pytest.mark.parametrize("mode", [BodyMode.NONE, BodyMode.BUFFERED])
def test_override_asks_for_response_headers_and_trailers(outbound, mode):
    value = (
        Pick(to=Kind.REQUEST_HEADERS, destinations=(A,), override=Override(mode))
        if outbound is Pick
        else Continue(Kind.REQUEST_HEADERS, override=Override(mode))
    )
    message = encoded(value)
    assert message.HasField("mode_override")
    assert message.mode_override == pb.ProcessingMode(
        request_body_mode=pb.ProcessingMode.BodySendMode.Value(mode.name),
        response_header_mode=pb.ProcessingMode.SEND,
        response_trailer_mode=pb.ProcessingMode.SEND,
    )


@pytest.mark.parametrize("kind", [Kind.REQUEST_BODY, Kind.RESPONSE_BODY])
@pytest.mark.parametrize(("chunk", "end"), [(b"abc", False), (b"", True)])
def test_echo_is_a_streamed_response(kind, chunk, end):
    common = getattr(encoded(Echo(kind, chunk, end)), kind).response
    assert common.body_mutation.streamed_response == pb.StreamedBodyResponse(body=chunk, end_of_stream=end)
    assert common.body_mutation.HasField("streamed_response")


def test_an_immediate_answer_carries_status_reason_and_retry_after():
    message = encoded(Immediate(429, RefuseReason.OVERLOADED, b'{"error":{}}', 1.2))
    answer = message.immediate_response
    assert (answer.status.code, answer.body, answer.details) == (429, b'{"error":{}}', "perilune_overloaded")
    assert set_by(answer.headers) == {
        "content-type": "application/json",
        "x-perilune-refused": "overloaded",
        "retry-after": "2",
    }


def test_immediate_without_retry():
    answer = encoded(Immediate(400, RefuseReason.BAD_JSON, b"{}")).immediate_response
    assert "retry-after" not in set_by(answer.headers)


def test_pick_may_replace_the_clients_credentials():
    mutation = encoded(
        Pick(to=Kind.REQUEST_BODY, destinations=(A,), authorization="Bearer k")
    ).request_body.response
    assert set_by(mutation.header_mutation)["authorization"] == "Bearer k"
    kept = encoded(Pick(to=Kind.REQUEST_BODY, destinations=(A,))).request_body.response
    assert "authorization" not in set_by(kept.header_mutation)


def test_a_decoded_body_goes_on_without_its_encodings_header():
    pick = Pick(to=Kind.REQUEST_BODY, destinations=(A,), body=b"{}", decoded=True)
    answer = pb.ProcessingResponse.FromString(wire.encode(pick)).request_body.response
    assert "content-encoding" in answer.header_mutation.remove_headers
    assert answer.body_mutation.body == b"{}"
    kept = encoded(Pick(to=Kind.REQUEST_BODY, destinations=(A,))).request_body.response
    assert "content-encoding" not in kept.header_mutation.remove_headers


@pytest.mark.parametrize(
    ("details", "reset"),
    [
        ("upstream_reset_before_response_started{connection_termination}", True),
        ("upstream_reset_before_response_started{remote_reset}", True),
        ("upstream_reset_before_response_started{connection_termination|TLS_error}", True),
        (
            "upstream_reset_before_response_started{remote_connection_failure|connect_error:_111}",
            False,
        ),
        ("upstream_reset_before_response_started{overflow}", False),
        ("via_upstream", False),
    ],
)
def test_an_endpoint_that_broke_off_is_told_from_one_that_could_not_be_reached(details: str, reset: bool):
    attributes = Struct()
    attributes.update({"upstream.address": A, "response.code_details": details})
    status = pb.HeaderMap(headers=[pb.HeaderValue(key=":status", raw_value=b"503")])
    message = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=status))
    message.attributes["envoy.filters.http.ext_proc"].CopyFrom(attributes)
    for decode in (wire.decode, wire.by_protobuf):
        found = decode(message.SerializeToString())
        assert isinstance(found, ResponseHeaders)
        assert (found.reset, found.served) == (reset, A)


def test_headers_that_only_gateways_send_are_removed_from_a_clients_request() -> None:
    """Unless this gateway sends them itself."""
    mutation = encoded(
        Pick(to=Kind.REQUEST_HEADERS, destinations=(A,))
    ).request_headers.response.header_mutation
    assert list(mutation.remove_headers) == list(names.INTERNAL_HEADERS)
    trusted = ((names.ENGINE_SECRET_HEADER, "s"),)
    picked = encoded(Pick(to=Kind.REQUEST_BODY, destinations=(A,), rank=1, headers=trusted))
    mutation = picked.request_body.response.header_mutation
    assert list(mutation.remove_headers) == [names.TRANSFER_TARGET_HEADER]
