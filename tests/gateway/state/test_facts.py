"""How facts reach those who hear them."""

import pytest

from perilune_gateway.state.facts import EndpointLeft, Fact, Facts, Judged


class Hears:
    def __init__(self, name: str, heard: list[tuple[str, Fact]]) -> None:
        self.name = name
        self.heard = heard

    def on_endpoint_left(self, fact: EndpointLeft) -> None:
        self.heard.append((self.name, fact))


def test_all_who_hear_a_kind_of_fact_are_told_in_their_order() -> None:
    heard: list[tuple[str, Fact]] = []
    facts = Facts()
    facts.listen(Hears("first", heard), Hears("second", heard))
    facts.tell(left := EndpointLeft("a"))
    facts.tell(Judged("a", "late", True))
    assert heard == [("first", left), ("second", left)]


def test_a_method_for_something_that_is_no_fact_is_an_error() -> None:
    class Misspelt:
        def on_endpoint_has_left(self, fact: EndpointLeft) -> None: ...

    with pytest.raises(TypeError, match=r"Misspelt\.on_endpoint_has_left: there is no such fact"):
        Facts().listen(Misspelt())


def test_who_hears_nothing_is_no_listener() -> None:
    with pytest.raises(TypeError, match="object hears nothing"):
        Facts().listen(object())
