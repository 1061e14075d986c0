"""Our few ext_proc messages have Envoy's numbers."""

import pytest
from google.protobuf.descriptor import FieldDescriptor
from protos import generate

from perilune_api import extproc_pb2 as pb

# envoy/service/ext_proc/v3/external_processor.proto and what it imports: name → number, and whether a message
# or a scalar. A number that is wrong here or there would be read as another field, silently.
FIELDS = {
    "ProcessingRequest": {
        "request_headers": 2,
        "response_headers": 3,
        "request_body": 4,
        "response_body": 5,
        "request_trailers": 6,
        "response_trailers": 7,
        "metadata_context": 8,
        "attributes": 9,
        "protocol_config": 11,
    },
    "ProtocolConfiguration": {"request_body_mode": 1, "response_body_mode": 2},
    "HttpHeaders": {"headers": 1, "end_of_stream": 3},
    "HttpBody": {"body": 1, "end_of_stream": 2},
    "HttpTrailers": {"trailers": 1},
    "ProcessingResponse": {
        "request_headers": 1,
        "response_headers": 2,
        "request_body": 3,
        "response_body": 4,
        "request_trailers": 5,
        "response_trailers": 6,
        "immediate_response": 7,
        "dynamic_metadata": 8,
        "mode_override": 9,
    },
    "HeadersResponse": {"response": 1},
    "BodyResponse": {"response": 1},
    "TrailersResponse": {"header_mutation": 1},
    "CommonResponse": {"status": 1, "header_mutation": 2, "body_mutation": 3, "clear_route_cache": 5},
    "ImmediateResponse": {"status": 1, "headers": 2, "body": 3, "details": 5},
    "HeaderMutation": {"set_headers": 1, "remove_headers": 2},
    "BodyMutation": {"body": 1, "clear_body": 2, "streamed_response": 3},
    "StreamedBodyResponse": {"body": 1, "end_of_stream": 2},
    "HeaderMap": {"headers": 1},
    "HeaderValue": {"key": 1, "value": 2, "raw_value": 3},
    "HeaderValueOption": {"header": 1, "append_action": 3},
    "HttpStatus": {"code": 1},
    "Metadata": {"filter_metadata": 1},
    "ProcessingMode": {
        "request_header_mode": 1,
        "response_header_mode": 2,
        "request_body_mode": 3,
        "response_body_mode": 4,
        "request_trailer_mode": 5,
        "response_trailer_mode": 6,
    },
}
BYTES = {"HttpBody.body", "ImmediateResponse.body", "BodyMutation.body", "StreamedBodyResponse.body",
         "HeaderValue.raw_value"}  # fmt: skip
ENUMS = {
    "ProcessingMode.BodySendMode": {
        "NONE": 0,
        "STREAMED": 1,
        "BUFFERED": 2,
        "BUFFERED_PARTIAL": 3,
        "FULL_DUPLEX_STREAMED": 4,
        "GRPC": 5,
    },
    "ProcessingMode.HeaderSendMode": {"DEFAULT": 0, "SEND": 1, "SKIP": 2},
    "CommonResponse.ResponseStatus": {"CONTINUE": 0, "CONTINUE_AND_REPLACE": 1},
    "HeaderValueOption.HeaderAppendAction": {
        "APPEND_IF_EXISTS_OR_ADD": 0,
        "ADD_IF_ABSENT": 1,
        "OVERWRITE_IF_EXISTS_OR_ADD": 2,
        "OVERWRITE_IF_EXISTS": 3,
    },
}
MESSAGES = pb.DESCRIPTOR.message_types_by_name


def test_every_message_is_pinned():
    assert set(MESSAGES) == set(FIELDS)


@pytest.mark.parametrize("message", FIELDS)
def test_fields_have_envoys_numbers(message):
    assert {field.name: field.number for field in MESSAGES[message].fields} == FIELDS[message]


def test_what_is_bytes_at_envoy_is_bytes_here():
    found = {
        f"{message.name}.{field.name}"
        for message in MESSAGES.values()
        for field in message.fields
        if field.type == FieldDescriptor.TYPE_BYTES
    }
    assert found == BYTES


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_envoys_numbers(name):
    message, enum = name.split(".")
    values = MESSAGES[message].enum_types_by_name[enum].values
    assert {value.name: value.number for value in values} == ENUMS[name]


def test_package_does_not_claim_envoys_names():
    assert pb.DESCRIPTOR.package == "perilune.extproc"


def test_committed_code_is_what_the_generator_writes(capsys):
    assert generate.main(["--check"]) == 0
    assert capsys.readouterr().err == ""


def test_stale_code_is_named(monkeypatch, capsys):
    path = generate.TARGET / "extproc_pb2.py"
    monkeypatch.setattr(generate, "generate", lambda: {path: b"something else"})
    assert generate.main(["--check"]) == 1
    assert "extproc_pb2.py is stale: run `make generate`" in capsys.readouterr().err
