"""Reasons why a source has no tokens for a prompt. They are counted, logged once, and decide which source is
asked next."""

from enum import StrEnum


class Cause(StrEnum):
    """Why a source did not answer; also a metric label."""

    TEMPLATE = "template"
    """The chat template refused the conversation or failed."""
    NO_TEMPLATE = "no_template"
    OWN_TEMPLATE = "own_template"
    """The request has its own template. Only the engine may decide to run it."""
    CONVERSATION = "conversation"
    """The messages do not have the form that their API prescribes."""
    PARITY = "parity"
    """Most engines make other tokens of this kind of prompt than the local tokenizer (proof.py)."""
    MEDIA = "media"
    STORED_CONVERSATION = "stored_conversation"
    """The request has a previous_response_id, and the gateway does not have what is stored in the engine."""
    NO_TEXT = "no_text"
    """The prompt is given as embeddings."""
    TOO_MUCH = "too_much"
    """The prompt is far too long for the model's context, so it is not tokenized."""
    TOKENIZER = "tokenizer"
    """The local tokenizer failed."""
    TIMEOUT = "timeout"
    NO_ENGINE = "no_engine"
    ENGINE_STATUS = "engine_status"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_ANSWER = "engine_answer"
    """The answer is not the JSON of a /tokenize answer."""


ENGINE_MAY_KNOW = frozenset((Cause.NO_TEMPLATE, Cause.OWN_TEMPLATE, Cause.TOKENIZER, Cause.PARITY))
"""Causes after which the engine is asked. After the others it would have no answer either."""


class CannotTellError(Exception):
    """A source has no tokens for this prompt. It is raised and caught within this package."""

    def __init__(self, cause: Cause, detail: object = "", estimate: int = 0) -> None:
        super().__init__(f"{cause} {detail}")
        self.cause = cause
        self.detail = detail
        self.estimate = estimate
        """The source's own estimate in tokens, better than one from bytes; 0 means that it has none."""


class UnplacedMediaError(CannotTellError):
    """A prompt has parts that are more than text, and no template here has a place for all of them."""

    def __init__(self, parts: int, estimate: int) -> None:
        super().__init__(Cause.MEDIA, f"{parts} parts", estimate)
        self.parts = parts
