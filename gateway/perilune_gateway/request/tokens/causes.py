"""Why a source of tokens could not tell them: counted, logged once, and what decides who is asked next."""

from enum import StrEnum


class Cause(StrEnum):
    """Why a source did not answer; metric label."""

    TEMPLATE = "template"
    """The chat template refused the conversation or failed."""
    NO_TEMPLATE = "no_template"
    OWN_TEMPLATE = "own_template"
    """The request brings its own template, which only the engine may trust."""
    CONVERSATION = "conversation"
    """Messages that have not their API's form."""
    MEDIA = "media"
    STORED_CONVERSATION = "stored_conversation"
    """previous_response_id: a part of the prompt lies in the engine."""
    NO_TEXT = "no_text"
    """Prompt embeddings."""
    TOO_MUCH = "too_much"
    """More than the model's context can hold, however few tokens it takes: not worth anybody's time."""
    TOKENIZER = "tokenizer"
    """The local tokenizer failed."""
    TIMEOUT = "timeout"
    NO_ENGINE = "no_engine"
    ENGINE_STATUS = "engine_status"
    ENGINE_UNREACHABLE = "engine_unreachable"
    ENGINE_ANSWER = "engine_answer"
    """Not the JSON of a /tokenize answer."""


ENGINE_MAY_KNOW = frozenset((Cause.NO_TEMPLATE, Cause.OWN_TEMPLATE, Cause.TOKENIZER))
"""After these the engine is asked; after the others it could not tell either."""


class CannotTellError(Exception):
    """A source cannot tell; never leaves this package."""

    def __init__(self, cause: Cause, detail: object = "", estimate: int = 0) -> None:
        super().__init__(f"{cause} {detail}")
        self.cause = cause
        self.detail = detail
        self.estimate = estimate
        """Tokens, where the source knows better than the bytes say; 0: it does not."""
